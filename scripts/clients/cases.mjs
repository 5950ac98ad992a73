// As cases.py: one line of standard output per case. URL and MODEL come from the command line.
export const [url, model] = process.argv.slice(2);
export const question = "What does os.path.join do?";
export const cities = ["Berlin", "Lisbon"];

export const weather = {
  type: "object",
  properties: { city: { type: "string", enum: cities } },
  required: ["city"],
  additionalProperties: false,
};

export function check(holds, what) {
  if (!holds) throw new Error(`not so: ${what}`);
}

export async function runCases(cases) {
  for (const [name, run] of Object.entries(cases)) {
    let problem = "";
    try {
      await run();
    } catch (error) {
      console.error(error);
      problem = `${error.name}: ${error.message}`.slice(0, 500);
    }
    console.log(`case: ${JSON.stringify({ name, problem })}`);
  }
}
