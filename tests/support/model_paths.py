"""Paths that real gateways and providers document."""

_VERTEX = "/projects/p/locations/l/publishers"
_BEDROCK_ARN = "arn%3Aaws%3Abedrock%3Aus-east-1%3A1%3Ainference-profile"

MODEL_CALLS = {
    "/v1/chat/completions": "openai",  # OpenAI, vLLM, LiteLLM, Mistral, Together, SGLang, LM Studio
    "/v1/completions": "openai",
    "/v1/responses": "openai",
    "/chat/completions": "openai",  # DeepSeek, LiteLLM
    "/responses": "openai",
    "/openai/v1/chat/completions": "openai",  # Groq
    "/openai/v1/responses": "openai",  # Azure OpenAI
    "/openai/responses": "openai",
    "/openai/deployments/gpt-4o/chat/completions": "openai",
    "/models/chat/completions": "openai",  # Azure AI Foundry, GitHub Models
    "/inference/chat/completions": "openai",
    "/inference/v1/chat/completions": "openai",  # Fireworks
    "/api/v1/chat/completions": "openai",  # OpenRouter
    "/api/v1/responses": "openai",
    "/compatible-mode/v1/chat/completions": "openai",  # Alibaba Cloud Model Studio
    "/api/paas/v4/chat/completions": "openai",  # Z.ai
    "/api/v3/chat/completions": "openai",  # Volcengine Ark
    "/v1beta/openai/chat/completions": "openai",  # Gemini's OpenAI form
    "/v1/projects/p/locations/l/endpoints/openapi/chat/completions": "openai",  # Vertex AI's
    "/backend-api/codex/responses": "openai",  # Codex with an account
    "/compat/chat/completions": "openai",  # Cloudflare AI Gateway
    "/v1/account/gateway/openai/chat/completions": "openai",
    "/v1/fim/completions": "openai",  # Mistral
    "/v1/messages": "anthropic",
    "/anthropic/v1/messages": "anthropic",  # Envoy AI Gateway, LiteLLM, Azure AI Foundry, DeepSeek
    "/api/v1/messages": "anthropic",  # OpenRouter
    "/api/anthropic/v1/messages": "anthropic",  # Z.ai
    # Vertex AI
    f"/v1{_VERTEX}/anthropic/models/claude-sonnet-4@20250514:rawPredict": "anthropic",
    f"/v1{_VERTEX}/anthropic/models/claude-sonnet-4:streamRawPredict": "anthropic",
    "/v1beta/models/gemini-2.5-pro:generateContent": "gemini",
    "/v1beta/models/gemini-2.5-pro:streamGenerateContent": "gemini",
    "/v1beta/models/gemini-2.5-pro%3AgenerateContent": "gemini",  # a client that escapes the colon
    "/v1/models/gemini-2.5-pro:generateContent": "gemini",
    "/genai/v1beta/models/gemini-2.5-pro:streamGenerateContent": "gemini",
    f"/v1beta1{_VERTEX}/google/models/gemini-2.5-pro:generateContent": "gemini",
    "/v1internal:streamGenerateContent": "gemini",  # Code Assist
    "/model/us.anthropic.claude-sonnet-4-20250514-v1%3A0/converse": "bedrock",
    f"/model/{_BEDROCK_ARN}%2Fus.anthropic.claude/converse-stream": "bedrock",
    "/model/amazon.nova-pro-v1:0/invoke": "bedrock",
    "/bedrock/model/anthropic.claude-sonnet-4/invoke-with-response-stream": "bedrock",  # LiteLLM
    "/api/chat": "ollama",
    "/ollama/api/generate": "ollama",  # Open WebUI
    "/v1/chat/completions/": "openai",  # some servers ignore the last slash
}

# Paths of the same services without a model, or whose answer is no turn of a conversation.
OTHER_CALLS = [
    "/v1/messages/count_tokens",
    "/v1/messages/batches",
    "/v1/messages;x=1",
    "/v1/responses/input_tokens",
    "/v1/responses/resp_1/cancel",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/images/generations",
    "/v1/audio/speech",
    "/v1/files",
    "/v1/models",
    "/v1/chat/completions/chatcmpl-1",
    "/v1/chat/completionsx",
    "/mychat/mycompletions",
    "/openai/deployments/gpt-4o/embeddings",
    "/v1beta/models/gemini-2.5-pro:countTokens",
    "/v1beta/models/gemini-embedding-001:embedContent",
    "/v1beta/models/gemini-2.5-pro",
    "/v1/projects/p/locations/l/publishers/anthropic/models/count-tokens:predict",
    "/model/anthropic.claude-sonnet-4/count-tokens",
    "/model/amazon.nova-pro-v1:0/async-invoke",
    "/api/tags",
    "/api/embed",
    "/api/chats",
    "/mcp",
    "/",
]
