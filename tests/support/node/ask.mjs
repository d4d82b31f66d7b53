// Questions, each asked through an SDK: for each a line of JSON on stdin, {"sdk", "url", "user", "stream", "messages"}.
// Prints for each a line with what a program that uses the SDK gets: {"text": ...}, or {"error": ..., "status": ...}.

import { createInterface } from "node:readline";

globalThis.AI_SDK_LOG_WARNINGS = false;
const key = { apiKey: "none" };

async function askOpenAI({ url, headers, stream }, ask, read) {
  const { default: OpenAI } = await import("openai");
  const answer = await ask(new OpenAI({ ...key, baseURL: `${url}/v1`, defaultHeaders: headers }));
  if (!stream) return read(answer);
  let text = "";
  for await (const event of answer) text += read(event);
  return text;
}

async function askAnthropic({ url, headers, stream, messages }) {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ ...key, baseURL: url, defaultHeaders: headers });
  const question = { model: "m", max_tokens: 1024, messages };
  const answer = stream ? await client.messages.stream(question).finalMessage() : await client.messages.create(question);
  return answer.content[0].text;
}

async function askVercel({ url, headers, stream, messages }, provider, create, path) {
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

async function askAWS({ url, headers, stream, messages }) {
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

const SDKS = {
  "openai-chat": (asked) =>
    askOpenAI(
      asked,
      (client) => client.chat.completions.create({ model: "m", messages: asked.messages, stream: asked.stream }),
      (answer) => answer.choices[0]?.[asked.stream ? "delta" : "message"].content ?? "",
    ),
  "openai-responses": (asked) =>
    askOpenAI(
      asked,
      (client) => client.responses.create({ model: "m", input: asked.messages, stream: asked.stream }),
      (answer) => {
        if (!asked.stream) return answer.output_text;
        return answer.type === "response.output_text.delta" ? answer.delta : "";
      },
    ),
  anthropic: askAnthropic,
  "vercel-openai": (asked) => askVercel(asked, "@ai-sdk/openai", "createOpenAI", "/v1"),
  "vercel-anthropic": (asked) => askVercel(asked, "@ai-sdk/anthropic", "createAnthropic", "/v1"),
  "vercel-google": (asked) => askVercel(asked, "@ai-sdk/google", "createGoogleGenerativeAI", "/v1beta"),
  aws: askAWS,
};

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  asked.headers = { "x-user-id": asked.user };
  let answer;
  try {
    answer = { text: await SDKS[asked.sdk](asked) };
  } catch (error) {
    const last = error.lastError ?? error;
    const status = last.status ?? last.statusCode ?? last.$metadata?.httpStatusCode ?? null;
    answer = { error: String(error.message), status };
  }
  console.log(JSON.stringify(answer));
}
