"""What a config.json leaves unsaid because its family's code says it: vLLM 0.32's rules and transformers' defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from plimsoll.errors import BadInput


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Families vLLM caches as multi-head latent attention where kv_lora_rank is given (its is_deepseek_mla).
MLA_FAMILIES = _names(
    """
    axk1 bailing_hybrid bailing_hybrid_v3 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_v41
    dots3_note glm4_moe_lite glm5_next glm5_next_text glm_moe_dsa hy_v4 kimi_k2 kimi_linear longcat_flash
    pangu_ultra_moe
    """
)
MAMBA1_FAMILIES = frozenset({"mamba", "falcon_mamba"})
MAMBA_ONLY_FAMILIES = MAMBA1_FAMILIES | {"mamba2"}
ENCODER_FAMILIES = _names("bert roberta xlm-roberta xlm-roberta-xl distilbert modernbert nomic_bert new gte camembert electra")
# Whose sliding_window means nothing unless use_sliding_window is true.
WINDOW_NEEDS_A_FLAG = ("qwen2", "qwen3", "mimo", "dots1", "smollm3")
# Every n-th layer is full attention and the others slide, where the file has neither layer_types nor its own pattern.
FULL_EVERY = MappingProxyType({
    "gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "gemma4_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4,
    "afmoe": 4,
})  # fmt: skip
# The window counts the token itself on top of sliding_window (vLLM's commandr.py).
WINDOW_PLUS_ONE = frozenset({"cohere2", "cohere2_moe"})

TIED = ENCODER_FAMILIES | _names(
    """
    bloom cohere cohere2 ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n_text
    gemma4_text gpt2 gpt_bigcode lfm2 lfm2_moe mamba minicpm minicpm3 mpt opt RefinedWeb RefinedWebModel smollm3
    starcoder2 whisper zamba2
    """
)
UNTIED = _names(
    """
    afmoe apertus arcee axk1 baichuan bailing_hybrid bailing_hybrid_v3 bailing_moe bailing_moe_v2 bamba chatglm
    codegen cohere2_moe dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_v41 dots1
    dots3_note exaone4 exaone_moe falcon_h1 glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm5_next
    glm5_next_text glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 internlm internlm2 internlm3 jamba kimi_k2 kimi_linear laguna
    llama llama4_text longcat_flash mamba2 mimo mimo_v2 mimo_v2_flash minimax minimax_m1 minimax_m2 minimax_m3
    minimax_m3_text minimax_text_01 ministral3 mistral mixtral mllama_text_model muse_glimmer_text nemotron
    nemotron-nas nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe orion pangu_ultra_moe persimmon phi phi3 phi3_v
    phi4mm phimoe qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text
    seed_oss solar stablelm step3_text step3p5 step3p7
    """
)
# Their files say whether the embeddings are tied, and where one does not, we do not know.
_SAY_SO_THEMSELVES = frozenset({"exaone", "plamo2", "plamo3", "telechat2"})
KNOWN = TIED | UNTIED | _SAY_SO_THEMSELVES

_MAMBA_GROUP_OF_ONE = {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
_DEEPSEEK = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_GEMMA = {"head_dim": 256}

# Only for families whose published files lean on them: Gemma 3 states no heads, LLaVA's text_config almost nothing.
DEFAULTS: Mapping[str, Mapping[str, object]] = MappingProxyType({
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
              "vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096},
    "gemma3_text": _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "sliding_window": 4096,
                             "max_position_embeddings": 131072},
    "gemma3n_text": _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 262400, "sliding_window": 512,
                              "max_position_embeddings": 32768, "num_kv_shared_layers": 15,
                              "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
    "gemma4_text": _GEMMA | {"global_head_dim": 512, "vocab_size": 262144, "sliding_window": 512,
                             "max_position_embeddings": 131072, "hidden_size_per_layer_input": 256,
                             "vocab_size_per_layer_input": 262144},
    "falcon": {"multi_query": True, "max_position_embeddings": 2048},
    "gpt_bigcode": {"multi_query": True},
    "cohere2": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "mpt": {"max_seq_len": 2048},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
    "jamba": {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
              "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    "bamba": _MAMBA_GROUP_OF_ONE,
    "granitemoehybrid": _MAMBA_GROUP_OF_ONE,
    "falcon_h1": _MAMBA_GROUP_OF_ONE,
    "zamba2": {"mamba_ngroups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
    "mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "falcon_mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "mamba2": {"state_size": 128, "conv_kernel": 4, "expand": 2, "n_groups": 8},
    "nemotron_h": {"n_groups": 8, "head_dim": 128},
})  # fmt: skip

# Far beyond any model, and small enough that nothing we build from them can grow large.
LAYERS_MAX = 4096
HEADS_MAX = 1 << 16
WIDTH_MAX = 1 << 24
VOCAB_MAX = 1 << 28
CONTEXT_MAX = 1 << 40
EXPERTS_MAX = 1 << 20
LIST_MAX = 1 << 17
TEXT_MAX = 512

_NOTHING: Mapping[str, object] = MappingProxyType({})


class Keys:
    """One object of a config.json. Null counts as absent, and a value of the wrong type is BadInput.

    `defaults` are the values transformers fills in where a key is absent altogether; `defaulted` records the ones
    that were asked for, because whoever reads the result should know that the file did not say so.
    """

    __slots__ = ("_defaults", "_path", "_values", "defaulted")

    def __init__(self, values: Mapping[str, object], path: str = "", defaults: Mapping[str, object] = _NOTHING) -> None:
        self._values = values
        self._path = path
        self._defaults = defaults
        self.defaulted: dict[str, object] = {}

    def with_defaults(self, defaults: Mapping[str, object]) -> Keys:
        """The same object, read with a family's defaults."""
        return Keys(self._values, self._path, defaults)

    def has(self, *names: str) -> bool:
        """Whether the file gives one of these keys a value."""
        return any(self._values.get(name) is not None for name in names)

    def _find(self, names: Sequence[str]) -> tuple[str, object]:
        for name in names:
            if (value := self._values.get(name)) is not None:
                return name, value
        if not any(name in self._values for name in names):
            for name in names:
                if (value := self._defaults.get(name)) is not None:
                    self.defaulted[name] = value
                    return name, value
        return names[0], None

    def _wrong(self, name: str, wanted: str, value: object) -> BadInput:
        return BadInput(f"config.json: {self._path}{name} should be {wanted}, not {_shown(value)}")

    def missing(self, name: str) -> BadInput:
        """The error for a key we cannot do without."""
        return BadInput(f"config.json: {self._path}{name} is missing")

    def count(self, *names: str, least: int = 1, most: int = WIDTH_MAX) -> int | None:
        """The first of these keys that has a value, as a whole number within bounds."""
        name, value = self._find(names)
        if value is None:
            return None
        number = _whole(value)
        if number is None or not least <= number <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}", value)
        return number

    def need(self, *names: str, most: int = WIDTH_MAX) -> int:
        """Like `count`, for a key without which there is no shape."""
        number = self.count(*names, most=most)
        if number is None:
            raise self.missing(names[0])
        return number

    def count_or_largest(self, *names: str, least: int = 0, most: int = WIDTH_MAX) -> int | None:
        """Like `count`, but a list (one value per layer or per modality) stands for its largest value."""
        name, value = self._find(names)
        if isinstance(value, (list, tuple)):
            return max(self.counts(name, least=least, most=most) or (), default=None)
        return self.count(*names, least=least, most=most)

    def counts(self, name: str, *, least: int = 0, most: int = WIDTH_MAX, null: int | None = None) -> tuple[int, ...] | None:
        """A list of whole numbers, in which null may stand for one of them."""
        items = self.items(name)
        if items is None:
            return None
        wholes = (null if item is None else _whole(item) for item in items)
        numbers = tuple(number for number in wholes if number is not None and least <= number <= most)
        if len(numbers) != len(items):
            raise self._wrong(name, f"a list of whole numbers from {least} to {most}", items)
        return numbers

    def items(self, name: str) -> Sequence[object] | None:
        """A list of anything."""
        _, value = self._find((name,))
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) > LIST_MAX:
            raise self._wrong(name, f"a list of at most {LIST_MAX} values", value)
        return value

    def words(self, name: str) -> tuple[str, ...] | None:
        """A list of short strings."""
        items = self.items(name)
        if items is None:
            return None
        words = tuple(item for item in items if isinstance(item, str) and len(item) <= TEXT_MAX)
        if len(words) != len(items):
            raise self._wrong(name, "a list of strings", items)
        return words

    def word(self, *names: str) -> str | None:
        """A short string."""
        name, value = self._find(names)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > TEXT_MAX:
            raise self._wrong(name, "a short string", value)
        return value

    def flag(self, name: str) -> bool | None:
        """True or false."""
        _, value = self._find((name,))
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(name, "true or false", value)

    def factor(self, name: str, *, most: float = 1e6) -> float | None:
        """A positive number that need not be whole."""
        _, value = self._find((name,))
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
            raise self._wrong(name, f"a number above 0 and up to {most:g}", value)
        return float(value)

    def child(self, name: str) -> Keys | None:
        """A nested object, or None where it is absent or empty."""
        _, value = self._find((name,))
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, "an object", value)
        return Keys(value, f"{self._path}{name}.") if value else None

    def part(self, *names: str) -> Keys | None:
        """The first of these keys that holds an object, where a family may write something else; None if none does."""
        name = next((name for name in names if isinstance(self._find((name,))[1], Mapping)), None)
        return self.child(name) if name else None

    def children(self, name: str) -> tuple[Keys, ...] | None:
        """A list of objects."""
        items = self.items(name)
        if items is None:
            return None
        found = tuple(Keys(item, f"{self._path}{name}[{n}].") for n, item in enumerate(items) if isinstance(item, Mapping))
        if len(found) != len(items):
            raise self._wrong(name, "a list of objects", items)
        return found

    def values(self) -> Iterable[Keys]:
        """The nested objects of this one, whatever they are called; anything else in it is passed over."""
        return (
            Keys(value, f"{self._path}{name}.") for name, value in self._values.items() if isinstance(value, Mapping) and value
        )

    def is_word(self, name: str) -> bool:
        """Whether the key holds a string, where a family allows either."""
        return isinstance(self._find((name,))[1], str)

    def is_list(self, name: str) -> bool:
        """Whether the key holds a list, where a family allows either."""
        return isinstance(self._find((name,))[1], (list, tuple))

    def size(self, *names: str) -> int | None:
        """A size that only describes something: what is not a sensible whole number is unknown, not an error."""
        _, value = self._find(names)
        number = _whole(value)
        return number if number is not None and 0 < number <= WIDTH_MAX else None


def _whole(value: object) -> int | None:
    """4096 or 4096.0; never true, which is an int to Python."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _shown(value: object) -> str:
    """A value in one short line, without walking into what may be deep or long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "such a list" if value else "an empty list"
    return f"a {type(value).__name__}"
