"""A random draw of the sizes and options of a configuration (`random_configs.py`)."""

import random

Fields = dict[str, object]
CONTEXT = 1024
LINEAR, FULL, WINDOWED = "linear_attention", "full_attention", "sliding_attention"


class Draw:
    """One draw: sizes that every family has, and what is drawn on top of them."""

    def __init__(self, family: str, seed: int) -> None:
        self.random = random.Random(f"{family} {seed}")
        self.even = self.random.random() < 0.5
        self.layers = self.random.choice((2, 3, 4, 5))
        self.kv_heads = self.random.choice((1, 2, 4) if self.even else (1, 2, 3, 5))
        groups = {1: (4, 8), 2: (2, 4), 4: (1, 2, 3)} if self.even else {}
        self.heads = self.kv_heads * self.random.choice(groups.get(self.kv_heads, (1, 2, 3, 5)))
        self.head_dim = self.random.choice((8, 12, 16, 20, 24))

    def one_of(self, *values: object) -> object:
        return self.random.choice(values)

    def flag(self, likely: float = 0.5) -> bool:
        return self.random.random() < likely

    def ffn(self) -> int:
        return 4 * self.random.randint(4, 16) if self.even else self.random.randint(11, 61)

    def base(self, *, own_head_dim: bool = True) -> Fields:
        """`own_head_dim`: heads need not add up to the width."""
        heads = self.heads * self.head_dim
        apart = own_head_dim and self.flag(0.7)
        # transformers wants the width of some families to be a multiple of heads all the same
        width = self.heads * self.random.randint(3, 9) if apart else heads
        fields: Fields = {
            "vocab_size": self.random.randint(97, 311),
            "hidden_size": width,
            "intermediate_size": self.ffn(),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": self.one_of(1e-5, 1e-6, 1e-3),
            "tie_word_embeddings": self.flag(0.3),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return fields | ({"head_dim": self.head_dim} if apart or self.flag() else {})

    def rope(self, *kinds: str, rotated: int | None = None) -> Fields:
        """`rotated`: values of a head that turn, where not all do."""
        kind = self.random.choice(
            kinds or ("default", "linear", "dynamic", "llama3", "yarn", "yarn", "longrope")
        )
        rope: Fields = {"rope_type": kind, "rope_theta": self.one_of(10000.0, 1e6, 777.7)}
        pairs = (rotated or self.head_dim) // 2
        factor = {"factor": self.one_of(2.0, 4.0, 7.5)}
        if kind in ("linear", "dynamic"):
            rope |= factor
        if kind == "llama3":
            rope |= factor | {"low_freq_factor": 1.0, "high_freq_factor": self.one_of(2.0, 4.0)}
            rope["original_max_position_embeddings"] = self.one_of(32, 64, 256)
        if kind == "yarn":
            rope |= factor | {"original_max_position_embeddings": self.one_of(64, 128, 512)}
            for name, values in (
                ("beta_fast", (16.0, 32.0)),
                ("beta_slow", (1.0, 2.0)),
                ("truncate", (True, False)),
                ("attention_factor", (1.0, 1.3)),
            ):
                if self.flag(0.4):
                    rope[name] = self.one_of(*values)
            if self.flag(0.4):
                rope |= {"mscale": self.one_of(1.0, 0.7), "mscale_all_dim": self.one_of(1.0, 0.5)}
        if kind == "longrope":
            rope |= {
                "short_factor": [1.0 + self.random.random() for _ in range(pairs)],
                "long_factor": [2.0 + self.random.random() for _ in range(pairs)],
                "original_max_position_embeddings": CONTEXT,
            } | (factor if self.flag() else {})
        return rope

    def window(self) -> int:
        return self.random.choice((5, 9, 33, 64, 130, 500))

    def kinds(self, *kinds: str, last: str = "") -> list[str]:
        """Of each layer one; every kind at least once where there are layers enough."""
        drawn = [*kinds, *(self.random.choice(kinds) for _ in range(self.layers))][: self.layers]
        self.random.shuffle(drawn)
        if last:
            drawn[-1] = last
        return drawn

    def experts(self, count: str = "num_experts") -> Fields:
        total = self.random.choice((4, 8, 12)) if self.even else self.random.randint(3, 9)
        ffn = 4 * self.random.randint(2, 8) if self.even else self.random.randint(7, 30)
        chosen = self.random.randint(1, min(4, total))
        return {count: total, "num_experts_per_tok": chosen, "moe_intermediate_size": ffn}

    def groups(self) -> Fields:
        """Experts in groups, of which some are looked at."""
        fields = self.experts("n_routed_experts")
        groups = self.random.choice((1, 2, 4))
        each = self.random.choice((2, 3) if groups > 1 else (3, 4, 8))
        kept = self.random.randint(1, groups)
        total = groups * each * (2 if self.even and groups * each % 4 else 1)
        chosen = min(4, total // groups * kept)
        return fields | {
            "n_routed_experts": total,
            "n_group": groups,
            "topk_group": kept,
            "num_experts_per_tok": self.random.randint(1, chosen),
            "routed_scaling_factor": self.one_of(1.0, 1.8, 2.5),
            "n_shared_experts": self.one_of(1, 2),
            "norm_topk_prob": self.flag(),
        }
