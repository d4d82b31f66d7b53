// An agent with a task and two tools, run by an SDK to its end: `node run.mjs SDK URL USER TASK`, what its tools bring back as
// JSON on stdin, by name. Prints what a program that uses the SDK gets: {"text": ...}, or {"error": ...}.

import { readFileSync } from "node:fs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const MOST_TURNS = 20;
const [sdk, url, user, task] = process.argv.slice(2);
const tools = Object.entries(JSON.parse(readFileSync(0, "utf8")));
const headers = { "x-user-id": user };
const key = { apiKey: "none" };
const nothing = { type: "object", properties: {} };
const messages = [{ role: "user", content: task }];

async function runOpenAI() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ ...key, baseURL: `${url}/v1`, defaultHeaders: headers });
  const listed = tools.map(([name, result]) => ({
    type: "function",
    function: { name, description: `Tool ${name}.`, parameters: nothing, parse: JSON.parse, function: () => result },
  }));
  const runner = client.chat.completions.runTools({ model: "m", messages, tools: listed }, { maxChatCompletions: MOST_TURNS });
  return runner.finalContent();
}

async function runAnthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const { betaTool } = await import("@anthropic-ai/sdk/helpers/beta/json-schema");
  const client = new Anthropic({ ...key, baseURL: url, defaultHeaders: headers });
  const listed = tools.map(([name, result]) => betaTool({ name, description: `Tool ${name}.`, inputSchema: nothing, run: () => result }));
  const question = { model: "m", max_tokens: 1024, messages, tools: listed, max_iterations: MOST_TURNS };
  return (await client.beta.messages.toolRunner(question)).content[0].text;
}

async function runVercel() {
  const { generateText, jsonSchema, stepCountIs, tool } = await import("ai");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const model = createOpenAI({ ...key, baseURL: `${url}/v1`, headers }).chat("m");
  const make = ([name, result]) => [name, tool({ description: `Tool ${name}.`, inputSchema: jsonSchema(nothing), execute: () => result })];
  const question = { model, messages, tools: Object.fromEntries(tools.map(make)), stopWhen: stepCountIs(MOST_TURNS) };
  return (await generateText(question)).text;
}

const run = { openai: runOpenAI, anthropic: runAnthropic, vercel: runVercel }[sdk];

try {
  console.log(JSON.stringify({ text: await run() }));
} catch (error) {
  console.log(JSON.stringify({ error: String(error.message) }));
}
