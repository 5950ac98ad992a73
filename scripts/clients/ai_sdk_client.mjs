// The AI SDK by its provider for servers like this one: node ai_sdk_client.mjs URL MODEL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { check, cities, model, question, runCases, url, weather } from "./cases.mjs";

const provider = createOpenAICompatible({
  name: "kvmesh",
  baseURL: url,
  apiKey: "any",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(model), prompt: question, maxOutputTokens: 100, maxRetries: 0 };

await runCases({
  async chat() {
    const answer = await generateText(asked);
    check(answer.text.length > 0 && answer.usage.outputTokens > 0, "text and usage came");
  },
  async "chat streamed"() {
    const stream = streamText(asked);
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    check(text.length > 0 && (await stream.usage).outputTokens > 0, "text and usage came");
  },
  async completions() {
    const answer = await generateText({ ...asked, model: provider.completionModel(model) });
    check(answer.text.length > 0, "text came");
  },
  async "structured output"() {
    const { object } = await generateObject({ ...asked, schema: jsonSchema(weather) });
    check(cities.includes(object.city), "a city was chosen");
  },
  async "an agent with a tool"() {
    const inputSchema = jsonSchema(weather);
    const execute = async ({ city }) => `${city}: sunny`;
    const answer = await generateText({
      ...asked,
      tools: { weather: tool({ description: "The weather of a city", inputSchema, execute }) },
      toolChoice: "required",
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "none" } : {}),
    });
    const [result] = answer.steps[0].toolResults;
    check(result.output.endsWith("sunny"), "the tool was called");
    check(answer.steps.length === 2, "its result was answered");
  },
});
