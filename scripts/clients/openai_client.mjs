// The official client for JavaScript: node openai_client.mjs URL MODEL
import OpenAI from "openai";
import { check, cities, model, question, runCases, url, weather } from "./cases.mjs";

const client = new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: question }];
const tool = { name: "weather", description: "The weather of a city", parameters: weather };

await runCases({
  async models() {
    check((await client.models.list()).data[0].id === model, "the model is listed");
  },
  async chat() {
    const asked = { model, messages, max_tokens: 12, ignore_eos: true };
    const whole = await client.chat.completions.create(asked);
    check(whole.usage.completion_tokens === 12, "12 tokens");
    const stream = client.chat.completions.stream(asked);
    check((await stream.finalContent()).length > 0, "text came");
  },
  async completions() {
    const asked = { model, prompt: "os.path", max_tokens: 8, stream: true };
    let text = "";
    for await (const chunk of await client.completions.create(asked)) text += chunk.choices[0].text;
    check(text.length > 0, "text came");
  },
  async tools() {
    const asked = { model, messages, tools: [{ type: "function", function: tool }] };
    const stream = client.chat.completions.stream({ ...asked, tool_choice: "required" });
    const [call] = (await stream.finalMessage()).tool_calls;
    check(cities.includes(JSON.parse(call.function.arguments).city), "a city was chosen");
  },
  async "structured output"() {
    const json_schema = { name: "weather", schema: weather, strict: true };
    const response_format = { type: "json_schema", json_schema };
    const answer = await client.chat.completions.parse({ model, messages, response_format });
    check(cities.includes(answer.choices[0].message.parsed.city), "a city was chosen");
  },
  async responses() {
    const asked = { model, input: question, max_output_tokens: 12, store: false };
    check((await client.responses.create(asked)).output_text.length > 0, "text came");
    const stream = client.responses.stream(asked);
    check((await stream.finalResponse()).output_text.length > 0, "text was streamed");
  },
  async errors() {
    const wrong = client.chat.completions.create({ model: "nobody", messages });
    const error = await wrong.catch((reason) => reason);
    check(error instanceof OpenAI.NotFoundError, "a wrong model is not found");
  },
});
