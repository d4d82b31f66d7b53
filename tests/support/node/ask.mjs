// One question, asked through an SDK: `node ask.mjs SDK URL USER stream|whole`, the conversation as JSON on stdin.
// Prints what a program that uses the SDK gets: {"text": ...}, or {"error": ..., "status": ...}.

import { readFileSync } from "node:fs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [sdk, url, user, mode] = process.argv.slice(2);
const messages = JSON.parse(readFileSync(0, "utf8"));
const headers = { "x-user-id": user };
const stream = mode === "stream";
const key = { apiKey: "none" };

async function askOpenAI(ask, read) {
  const { default: OpenAI } = await import("openai");
  const answer = await ask(new OpenAI({ ...key, baseURL: `${url}/v1`, defaultHeaders: headers }));
  if (!stream) return read(answer);
  let text = "";
  for await (const event of answer) text += read(event);
  return text;
}

async function askAnthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ ...key, baseURL: url, defaultHeaders: headers });
  const question = { model: "m", max_tokens: 1024, messages };
  const answer = stream ? await client.messages.stream(question).finalMessage() : await client.messages.create(question);
  return answer.content[0].text;
}

async function askVercel(provider, create, path) {
  const { generateText, streamText } = await import("ai");
  const make = (await import(provider))[create];
  const model = make({ ...key, baseURL: `${url}${path}`, headers });
  const question = { model: provider === "@ai-sdk/openai" ? model.chat("m") : model("m"), messages };
  if (!stream) return (await generateText(question)).text;
  let failure;
  const { textStream } = streamText({ ...question, onError: ({ error }) => (failure = error) });
  let text = "";
  for await (const piece of textStream) text += piece;
  if (failure) throw failure;
  return text;
}

async function askAWS() {
  const { BedrockRuntimeClient, ConverseCommand, ConverseStreamCommand } = await import("@aws-sdk/client-bedrock-runtime");
  const credentials = { accessKeyId: "none", secretAccessKey: "none" };
  const client = new BedrockRuntimeClient({ endpoint: url, region: "us-east-1", credentials });
  const addUser = (next) => (call) => next({ ...call, request: Object.assign(call.request, { headers: { ...call.request.headers, ...headers } }) });
  client.middlewareStack.add(addUser, { step: "build" });
  const said = messages.map(({ role, content }) => ({ role, content: [{ text: content }] }));
  const question = { modelId: "m", messages: said };
  if (!stream) return (await client.send(new ConverseCommand(question))).output.message.content[0].text;
  let text = "";
  for await (const event of (await client.send(new ConverseStreamCommand(question))).stream)
    text += event.contentBlockDelta?.delta.text ?? "";
  return text;
}

const ask = {
  "openai-chat": () =>
    askOpenAI(
      (client) => client.chat.completions.create({ model: "m", messages, stream }),
      (answer) => answer.choices[0]?.[stream ? "delta" : "message"].content ?? "",
    ),
  "openai-responses": () =>
    askOpenAI(
      (client) => client.responses.create({ model: "m", input: messages, stream }),
      (answer) => (stream ? (answer.type === "response.output_text.delta" ? answer.delta : "") : answer.output_text),
    ),
  anthropic: askAnthropic,
  "vercel-openai": () => askVercel("@ai-sdk/openai", "createOpenAI", "/v1"),
  "vercel-anthropic": () => askVercel("@ai-sdk/anthropic", "createAnthropic", "/v1"),
  "vercel-google": () => askVercel("@ai-sdk/google", "createGoogleGenerativeAI", "/v1beta"),
  aws: askAWS,
}[sdk];

try {
  console.log(JSON.stringify({ text: await ask() }));
} catch (error) {
  const last = error.lastError ?? error;
  console.log(JSON.stringify({ error: String(error.message), status: last.status ?? last.statusCode ?? last.$metadata?.httpStatusCode ?? null }));
}
