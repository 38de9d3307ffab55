"""What a graphics card is to vLLM: the memory it sees there, how fast that memory is, how fast the card computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from plimsoll.errors import BadInput
from plimsoll.units import GIB

# Makers' and brands' words that people leave out; what is left names the card.
_FILLER = frozenset({"nvidia", "amd", "geforce", "tesla", "instinct", "corporation"})
# "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "h100 mig"
_MIG_SUFFIX = r"(?i)[\s-]*\bmig\b(?P<profile>[\s-]*\d+g\.\d+gb\S*)?\s*$"


class Vendor(StrEnum):
    """Who makes the chip, and so which build of vLLM runs on it."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"


@dataclass(frozen=True)
class Gpu:
    """One card. A rate that no source states, or that the hardware does not have, is None; none is guessed.

    `total_bytes` is the total of cudaMemGetInfo on Linux (hipMemGetInfo on AMD), which vLLM multiplies by
    --gpu-memory-utilization. It is less than the size on the box, and a driver or ECC moves it: `total_low_bytes` and
    `total_high_bytes` bound what was seen (measured) or what is likely (estimated).
    """

    name: str
    vendor: Vendor
    box_gb: int  # the size the maker prints
    total_bytes: int
    total_low_bytes: int
    total_high_bytes: int
    memory_is_measured: bool
    memory_starts: int  # public logs, or rows of our table of starts, that print the total; 0 where it is estimated
    memory_evidence: str
    memory_kind: str
    unified_memory: bool  # the operating system hands out the same memory to ordinary processes
    bandwidth_bytes_per_s: int | None
    bf16_flops: int | None  # dense, 32-bit accumulation
    fp8_flops: int | None  # dense, 32-bit accumulation
    compute_capability: tuple[int, int] | None  # None on AMD
    arch: str  # "sm_90", "gfx942"
    aliases: tuple[str, ...]
    sources: tuple[str, ...]
    note: str = ""

    def __post_init__(self) -> None:
        assert self.total_low_bytes <= self.total_bytes <= self.total_high_bytes, f"{self.name}: total outside its band"
        assert self.memory_is_measured == (self.memory_starts > 0), f"{self.name}: measured means that starts back it"

    def __str__(self) -> str:
        return f"{self.name} ({self.total_bytes / GIB:.2f} GiB)"


@dataclass(frozen=True)
class Ambiguous:
    """Names that fit more than one card, so that we ask instead of choosing."""

    names: tuple[str, ...]
    candidates: tuple[str, ...]  # names of cards in the table
    because: str


def gpu_named(name: str) -> Gpu:
    """The card that people call `name`: its own name, nvidia-smi's, a cloud's or a short one, however it is spaced."""
    found = _by_key().get(_key(name))
    if found is not None:
        return found
    shown = " ".join(name.split())[:60]  # a message is one line
    _refuse_mig(shown)
    unclear = _ambiguous_by_key().get(_key(name))
    if unclear is not None:
        raise BadInput(f'"{shown}" does not say which card: {unclear.because}; say {_either(unclear.candidates)}')
    _refuse_several(shown)
    nearest = ", ".join(nearest_names(name))
    raise BadInput(f'no GPU called "{shown}" is known; nearest: {nearest}; or give its memory: --gpu-memory-gib')


def _refuse_several(name: str) -> None:
    """`8xH100`, `H100 x 8`: how many there are is the command's to say."""
    found = re.fullmatch(r"(?P<n>\d{1,3}) ?[xX*] ?(?P<card>.+)|(?P<card2>.+?) ?[xX*] ?(?P<n2>\d{1,3})", name)
    card = found and (found["card"] or found["card2"])
    if card and (_key(card) in _by_key() or _key(card) in _ambiguous_by_key()):
        number = found["n"] or found["n2"] if found else ""
        raise BadInput(f'"{name}" is {number} cards: say --gpu {card}; how many is what the command asks for (-tp {number})')


def nearest_names(name: str, n: int = 3) -> list[str]:
    """The `n` cards whose names or aliases look most like `name`, the likeliest first."""
    from difflib import SequenceMatcher  # only a misspelt name needs it

    wanted = _key(name)
    likeness: dict[str, float] = {}
    for key, gpu in _by_key().items():
        likeness[gpu.name] = max(likeness.get(gpu.name, 0.0), SequenceMatcher(None, wanted, key).ratio())
    return sorted(likeness, key=lambda known: -likeness[known])[:n]


def _key(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in _FILLER)


@cache
def _by_key() -> dict[str, Gpu]:
    return {_key(spelling): gpu for gpu in GPUS for spelling in (gpu.name, *gpu.aliases)}


@cache
def _ambiguous_by_key() -> dict[str, Ambiguous]:
    return {_key(spelling): unclear for unclear in AMBIGUOUS for spelling in unclear.names}


def _refuse_mig(name: str) -> None:
    suffix = re.search(_MIG_SUFFIX, name)
    if suffix is None:
        return
    whole = _by_key().get(_key(name[: suffix.start()]))
    of_what = f"of {whole.name}" if whole else "of a card"
    raise BadInput(f'"{name}" is a MIG slice {of_what}, not a whole card: give the size of the slice in GiB')


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


# The cards people serve language models on, with where each figure comes from; docs/gpus.md is printed from this.
#
# Memory is what a Linux process is told, not what the box says. Three things move it:
# - the driver: NVIDIA's recent ones keep 0.06 to 0.2 GiB more for themselves (RTX 4090: 23.65, now 23.52);
# - ECC on GDDR6 cards takes 1/16 (RTX A6000 47.43 without, 44.43 with); HBM carries its own, GDDR7 too;
# - Windows and WSL report nearly the whole card (RTX 3060: 12.0 against 11.63), so readings from there are left out.
# A measured figure is the newest driver's found, with ECC as delivered; the band holds every Linux reading found, and a
# little more where there are few.
# "id N" stands for a public log or page; the number only tells one from another.
#
# Rates are dense: makers' sheets often print twice as much, for 2:4 sparse weights, which vLLM does not use. GeForce
# cards accumulate in 32 bits at half the rate of 16 bits, and vLLM accumulates in 32: those are the figures here.
#
# The file is long because it is a table: one entry a card, and a reader looks one up rather than reads on.

H100_SHEET = (
    "NVIDIA H100 Tensor Core GPU datasheet: https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
)
H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet: https://www.nvidia.com/en-us/data-center/h200/"
GH200_SHEET = "NVIDIA GH200 Grace Hopper Superchip datasheet"
BLACKWELL_SHEET = (
    "NVIDIA Blackwell datasheet (GB200 NVL72, HGX B200), table copied at "
    "https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html"
)
BLACKWELL_ULTRA = (
    "Per-GPU figures of GB300 and B300: https://verda.com/blog/gb300-nvl72-architecture, "
    "https://glennklockwood.com/garden/processors/B300"
)
CHINA_HOPPER = (
    "citsjtu2020/LLM-Prof hardware_spec.md (NVIDIA publishes no datasheet); 148 TFLOPS and 4.0 TB/s also "
    "at https://willitrunai.com/es/gpus/h20-96gb"
)
CHINA_TABLE = (
    "citsjtu2020/LLM-Prof hardware_spec.md and feifeibear/LLMRoofline hardware_dict.py (NVIDIA publishes no datasheet)"
)
A100_SHEET = (
    "NVIDIA A100 Tensor Core GPU datasheet: "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
A30_SHEET = "NVIDIA A30 Tensor Core GPU datasheet"
A40_SHEET = "NVIDIA A40 datasheet and NVIDIA Ampere GA102 GPU Architecture whitepaper V2.0"
A10_SHEET = "NVIDIA A10 Tensor Core GPU datasheet"
A10G_PAGE = "NVIDIA A10G datasheet, by way of https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/"
A16_SHEET = "NVIDIA A16 datasheet; https://hmc-tech.com/gpu/nvidia-a16-vs-nvidia-a40"
A2_SHEET = "NVIDIA A2 Tensor Core GPU datasheet; https://hmc-tech.com/gpu/nvidia-gb200-vs-nvidia-a2"
L4_SHEET = "NVIDIA L4 Tensor Core GPU datasheet (242 and 485 TFLOPS are sparse: halved)"
L40_SHEET = "NVIDIA L40 and L40S datasheets, table copied at https://www.mullet.se/product.html?product_id=355414"
T4_SHEET = "NVIDIA T4 datasheet"
V100_SHEET = "NVIDIA V100 Tensor Core GPU datasheet"
GA102_PAPER = "NVIDIA Ampere GA102 GPU Architecture whitepaper V2.0"
ADA_PAPER = "NVIDIA Ada GPU Architecture whitepaper V2.01"
RTX_BLACKWELL_PAPER = "NVIDIA RTX Blackwell GPU Architecture whitepaper V1.1"
RTX_A_SHEET = "NVIDIA RTX A5000 and A4000 datasheets (222.2 and 153.4 TFLOPS are sparse: halved)"
RTX_ADA_SHEET = (
    "NVIDIA RTX 6000 and 5000 Ada Generation datasheets (1,457 and 1,044.4 TFLOPS are sparse FP8: halved, again for BF16)"
)
RTX_PRO_PAGE = (
    "NVIDIA RTX PRO 6000 Blackwell datasheets; dense rates at "
    "https://hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris"
)
RTX_PRO_SERVER = (
    "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet of December 2025: 1597 GB/s, no BF16 rate "
    "(quoted in id 68387635605)"
)
GEFORCE_PAGES = "NVIDIA GeForce product pages"
CARDS_5060TI = "https://club386.com/?p=104197 (RTX 5060 Ti and 4060 Ti side by side)"
SPARK_PAGE = (
    "NVIDIA DGX Spark hardware overview; "
    "https://blog.kubesimplify.com/blog/day-3-the-dgx-spark-unpacked-gb10-unified-memory-sm-121-and-the-one-reason-this-hardware-exists"
)
THOR_SHEET = (
    "NVIDIA Jetson Thor series modules datasheet, table quoted in id 44448955983 (517 TFLOPS dense FP8 = sparse FP16, halved)"
)
ORIN_SHEET = "NVIDIA Jetson AGX Orin series datasheet"
MI200_SHEET = "AMD Instinct MI200 series datasheets (MI250X: 383 TFLOPS, 3.2 TB/s, 128 GB a card of two devices)"
MI300X_SHEET = "AMD Instinct MI300X data sheet; https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
MI325X_SHEET = (
    "AMD Instinct MI325X data sheet; https://docs.vultr.com/inference-cookbook/rocm/getting-started/hardware-requirements"
)
MI350_SHEET = "AMD Instinct MI350X and MI355X data sheets; https://gangliao.me/blog/2026/amd-gpu-architecture-deep-dive"
NO_BF16 = "no bf16: vLLM needs --dtype half"


def _gpu(
    name: str, *aliases: str, box: int, gib: float, band: tuple[float, float], starts: int, seen: str, kind: str,
    gbps: float | None, bf16: float | None, fp8: float | None, arch: str, sources: tuple[str, ...],
    unified: bool = False, note: str = "",
) -> Gpu:  # fmt: skip
    """A row in the units people write: GiB, GB/s and TFLOPS; `starts` 0 means that the memory is estimated."""
    digits = arch.removeprefix("sm_")
    low_gib, high_gib = band
    return Gpu(
        name=name, vendor=Vendor.NVIDIA if arch.startswith("sm_") else Vendor.AMD, box_gb=box,
        total_bytes=round(gib * GIB), total_low_bytes=round(low_gib * GIB), total_high_bytes=round(high_gib * GIB),
        memory_is_measured=starts > 0, memory_starts=starts, memory_evidence=seen, memory_kind=kind, unified_memory=unified,
        bandwidth_bytes_per_s=None if gbps is None else round(gbps * 10**9),
        bf16_flops=None if bf16 is None else round(bf16 * 10**12),
        fp8_flops=None if fp8 is None else round(fp8 * 10**12),
        compute_capability=(int(digits[:-1]), int(digits[-1])) if digits.isdecimal() else None,
        arch=arch, aliases=aliases, sources=sources, note=note,
    )  # fmt: skip


# An alias that could mean another card too is a choice; `# chosen:` says why it is not AMBIGUOUS below.
# The formatter would make a page of every card.
# fmt: off
_HOPPER = (
    _gpu(
        "H100 SXM 80GB",
        *("NVIDIA H100 80GB HBM3", "H100 80GB", "H100 SXM", "H100 SXM5", "H100 SXM5 80GB", "h100-80g"),
        "nvidia-h100-mega-80gb",
        "H100",  # chosen: nearly every H100 that is rented is the SXM one; PCIe and NVL say so in their names
        box=80, gib=79.19, band=(79.18, 79.22), starts=26,
        seen="26 rows of the table of starts (llm-d-planner#205 and its docs, one more)",
        kind="HBM3", gbps=3350, bf16=989.5, fp8=1979, arch="sm_90", sources=(H100_SHEET,),
    ),
    _gpu(
        "H100 PCIe 80GB", "NVIDIA H100 PCIe", "h100-pcie-80g",
        box=80, gib=79.11, band=(79.11, 79.25), starts=1,
        seen="81008 MiB in id 33356850601",
        kind="HBM2e", gbps=2039, bf16=756.5, fp8=1513, arch="sm_90", sources=(H100_SHEET,),
    ),
    _gpu(
        "H100 NVL 94GB", "NVIDIA H100 NVL", "H100 NVL 188GB",
        box=94, gib=93.02, band=(93.01, 93.12), starts=1,
        seen="93.016 GiB in id 5684193198",
        kind="HBM3", gbps=3900, bf16=835.5, fp8=1670.5, arch="sm_90", sources=(H100_SHEET,),
    ),
    _gpu(
        "H200 SXM 141GB",
        *("NVIDIA H200", "H200 141GB", "H200 SXM", "H200 SXM5", "nvidia-h200-141gb"),
        "H200",  # chosen: the NVL card says so in its name
        box=141, gib=150_109_880_320 / GIB, band=(139.7, 139.81), starts=5,
        seen=(
            "150,109,880,320 bytes in our own runs (captures/vllm-0.25.1-h200); 3 rows of the table of "
            "starts, 139.72 and 139.80; 139.801 in id 56664826640"
        ),
        kind="HBM3e", gbps=4800, bf16=989.5, fp8=1979, arch="sm_90", sources=(H200_SHEET,),
    ),
    _gpu(
        "H200 NVL 141GB", "NVIDIA H200 NVL",
        box=141, gib=150_109_880_320 / GIB, band=(139.7, 139.81), starts=1,
        seen="150.1 GB in id 55236407445, the same as H200 SXM",
        kind="HBM3e", gbps=4800, bf16=835.5, fp8=1670.5, arch="sm_90", sources=(H200_SHEET,),
    ),
    _gpu(
        "H20 96GB", "NVIDIA H20", "H20",  # chosen: nvidia-smi calls the later 141 GB card H20-3e
        box=96, gib=95.0, band=(94.95, 95.05), starts=1,
        seen="97285 MiB in id 16230249453",
        kind="HBM3", gbps=4000, bf16=148, fp8=296, arch="sm_90", sources=(CHINA_HOPPER,),
    ),
    _gpu(
        "H20 141GB", "NVIDIA H20-3e", "H20 HBM3e",
        box=141, gib=139.72, band=(139.7, 139.81), starts=1,
        seen="vllm-project/vllm#31273 (139.72)",
        kind="HBM3e", gbps=4800, bf16=148, fp8=296, arch="sm_90", sources=(CHINA_HOPPER,),
    ),
    _gpu(
        "H800 SXM 80GB", "NVIDIA H800", "H800", "H800 80GB",
        box=80, gib=79.19, band=(79.1, 79.35), starts=0,
        seen="estimated: the same memory as H100 SXM",
        kind="HBM3", gbps=3350, bf16=989.5, fp8=1979, arch="sm_90", sources=(CHINA_TABLE,),
    ),
    _gpu(
        "GH200 96GB", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "GH200 480GB",
        box=96, gib=94.5, band=(94.5, 95.57), starts=4,
        seen="94.50 in id 66969815042, 69154996746 and 70245752177; 95.57 in vllm-project/vllm#10643 (older driver)",
        kind="HBM3", gbps=4000, bf16=989.5, fp8=1979, arch="sm_90", sources=(GH200_SHEET,), unified=True,
        note="480GB and 120GB in its names are the processor's memory",
    ),
    _gpu(
        "GH200 144GB", "NVIDIA GH200 144G HBM3e", "GH200 144G",
        box=144, gib=153_008_209_920 / GIB, band=(142.4, 142.6), starts=1,
        seen="153,008,209,920 bytes in id 71213094565",
        kind="HBM3e", gbps=4900, bf16=989.5, fp8=1979, arch="sm_90", sources=(GH200_SHEET,), unified=True,
    ),
)

_BLACKWELL = (
    _gpu(
        "B200", "NVIDIA B200", "B200 180GB", "B200 192GB", "HGX B200", "DGX B200", "B200 SXM",
        box=180, gib=178.36, band=(178.3, 178.37), starts=5,
        seen="178.36 in 3 logs of SemiAnalysisAI/InferenceX; 182631 and 182642 MiB in id 25224556183 and 2097843420",
        kind="HBM3e", gbps=7700, bf16=2250, fp8=4500, arch="sm_100", sources=(BLACKWELL_SHEET,),
    ),
    _gpu(
        "GB200", "NVIDIA GB200", "GB200 NVL72", "GB200 186GB", "GB200 192GB",
        box=186, gib=184.31, band=(184.3, 184.32), starts=5,
        seen="184.31 in id 57404854696, 66768263030, 54235603216, 56824116710 and 53295161045",
        kind="HBM3e", gbps=8000, bf16=2500, fp8=5000, arch="sm_100", sources=(BLACKWELL_SHEET,), unified=True,
    ),
    _gpu(
        "B300", "NVIDIA B300 SXM6 AC", "NVIDIA B300", "B300 288GB", "B300 270GB", "HGX B300", "DGX B300",
        box=288, gib=267.69, band=(267.6, 267.7), starts=4,
        seen="267.69 in id 71558444295, 68291342646, 69548815856 and 65912187833",
        kind="HBM3e", gbps=7700, bf16=2250, fp8=4500, arch="sm_103", sources=(BLACKWELL_ULTRA,),
        note="sources give 7.7 and 8 TB/s; the lower is here",
    ),
    _gpu(
        "GB300", "NVIDIA GB300", "GB300 NVL72", "GB300 288GB", "GB300 279GB",
        box=288, gib=276.5, band=(276.45, 276.55), starts=2,
        seen="276.50 in id 55106805727 (DGX Station) and 68898214566",
        kind="HBM3e", gbps=8000, bf16=2500, fp8=5000, arch="sm_103", sources=(BLACKWELL_ULTRA,), unified=True,
    ),
    _gpu(
        "RTX PRO 6000 Blackwell Server", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server",
        box=96, gib=94.97, band=(94.96, 95.01), starts=4,
        seen="94.971 in id 56197228770, 54858659041 and 57578922363; 97250 MiB in id 57372906612",
        kind="GDDR7", gbps=1597, bf16=None, fp8=None, arch="sm_120", sources=(RTX_PRO_SERVER,),
    ),
    _gpu(
        "RTX PRO 6000 Blackwell Workstation", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "RTX PRO 6000 Workstation",
        box=96, gib=95.0, band=(94.96, 95.01), starts=1,
        seen="95.01 in one row of the table of starts (edition not stated)",
        kind="GDDR7", gbps=1792, bf16=503.8, fp8=1007.6, arch="sm_120", sources=(RTX_PRO_PAGE,),
    ),
    _gpu(
        "RTX PRO 6000 Blackwell Max-Q", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "RTX PRO 6000 Max-Q",
        box=96, gib=94.97, band=(94.96, 95.01), starts=1,
        seen="97247 MiB in id 61214788326",
        kind="GDDR7", gbps=1792, bf16=None, fp8=None, arch="sm_120", sources=(RTX_PRO_PAGE,),
    ),
    _gpu(
        "RTX 5090", "NVIDIA GeForce RTX 5090", "5090", "RTX 5090 32GB",
        box=32, gib=31.35, band=(31.34, 31.37), starts=6,
        seen="31.342 to 31.366 in id 54779038834, 54674697403, 57913219673, 45839958736, 53110813666 and 60236002535",
        kind="GDDR7", gbps=1792, bf16=209.5, fp8=419, arch="sm_120", sources=(RTX_BLACKWELL_PAPER,),
    ),
    _gpu(
        "RTX 5080", "NVIDIA GeForce RTX 5080", "5080", "RTX 5080 16GB",
        box=16, gib=15.47, band=(15.46, 15.51), starts=3,
        seen="15.48 in vllm-project/vllm#14452; 15840 and 15880 MiB in id 56229221341 and 70109485269",
        kind="GDDR7", gbps=960, bf16=112.6, fp8=225.1, arch="sm_120", sources=(RTX_BLACKWELL_PAPER,),
    ),
    _gpu(
        "RTX 5070 Ti", "NVIDIA GeForce RTX 5070 Ti", "5070 Ti", "RTX 5070 Ti 16GB",
        box=16, gib=15.46, band=(15.43, 15.48), starts=2,
        seen="15842 and 15808 MiB in id 53359229009 and 53693779035",
        kind="GDDR7", gbps=896, bf16=87.9, fp8=175.8, arch="sm_120", sources=(RTX_BLACKWELL_PAPER,),
    ),
    _gpu(
        "RTX 5060 Ti 16GB", "5060 Ti 16GB", "5060ti-16g",
        box=16, gib=15.45, band=(15.44, 15.48), starts=2,
        seen="15.444 in id 33127741255; 15850 MiB in id 53359229009",
        kind="GDDR7", gbps=448, bf16=None, fp8=None, arch="sm_120", sources=(CARDS_5060TI,),
    ),
    _gpu(
        "GB10", "NVIDIA GB10", "DGX Spark", "DGX Spark GB10", "Spark",
        box=128, gib=121.63, band=(119.69, 121.7), starts=5,
        seen=(
            "121.628 in id 51987564204 and 51877149960, 121.693 in id 59951372714 and 59936967852, 119.698 in "
            "id 52989208299"
        ),
        kind="LPDDR5X", gbps=273, bf16=None, fp8=None, arch="sm_121", sources=(SPARK_PAGE,), unified=True,
        note="NVIDIA states only 1 PFLOPS of sparse FP4",
    ),
    _gpu(
        "Jetson AGX Thor 128GB", "NVIDIA Thor", "Jetson Thor", "Jetson AGX Thor", "Jetson T5000", "Thor",
        box=128, gib=122.8, band=(122.75, 122.85), starts=2,
        seen="125748 MiB in id 68879471529 and 59636927110",
        kind="LPDDR5X", gbps=273, bf16=258.5, fp8=517, arch="sm_110", sources=(THOR_SHEET,), unified=True,
    ),
)

_AMPERE = (
    _gpu(
        "A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB",
        *("A100 80GB", "A100-80G"),  # chosen: as much memory as PCIe, 5 % more bandwidth, and by far the more rented
        box=80, gib=79.15, band=(79.14, 79.25), starts=1,
        seen="79.151 in id 6934259882",
        kind="HBM2e", gbps=2039, bf16=312, fp8=None, arch="sm_80", sources=(A100_SHEET,),
    ),
    _gpu(
        "A100 PCIe 80GB", "NVIDIA A100 80GB PCIe", "A100 80GB PCIe",
        box=80, gib=79.14, band=(79.14, 79.25), starts=1,
        seen="one row of the table of starts (vllm-project/vllm#7992)",
        kind="HBM2e", gbps=1935, bf16=312, fp8=None, arch="sm_80", sources=(A100_SHEET,),
    ),
    _gpu(
        "A100 SXM 40GB", "NVIDIA A100-SXM4-40GB", "A100 SXM4 40GB",
        *("A100 40GB", "A100-40G"),  # chosen: PCIe differs in name only; memory and bandwidth agree
        box=40, gib=39.49, band=(39.38, 39.56), starts=5,
        seen=(
            "39.494 in id 60591431065 and 59685071609; 3 rows of the table of starts, 39.38 to 39.49 (form not stated)"
        ),
        kind="HBM2", gbps=1555, bf16=312, fp8=None, arch="sm_80", sources=(A100_SHEET,),
    ),
    _gpu(
        "A100 PCIe 40GB", "NVIDIA A100-PCIE-40GB", "A100 40GB PCIe",
        box=40, gib=39.38, band=(39.38, 39.56), starts=1,
        seen="40326 MiB in id 14004674982",
        kind="HBM2", gbps=1555, bf16=312, fp8=None, arch="sm_80", sources=(A100_SHEET,),
    ),
    _gpu(
        "A800 SXM 80GB", "NVIDIA A800-SXM4-80GB",
        *("A800", "A800 80GB"),  # chosen: as for A100 80GB
        box=80, gib=79.15, band=(79.1, 79.35), starts=0,
        seen="estimated: the same memory as A100 SXM 80GB",
        kind="HBM2e", gbps=2039, bf16=312, fp8=None, arch="sm_80", sources=(CHINA_TABLE,),
    ),
    _gpu(
        "A800 PCIe 80GB", "NVIDIA A800 80GB PCIe", "A800 80GB PCIe",
        box=80, gib=79.15, band=(79.1, 79.35), starts=0,
        seen="estimated: the same memory as A100 PCIe 80GB",
        kind="HBM2e", gbps=1935, bf16=312, fp8=None, arch="sm_80", sources=(A100_SHEET,),
        note="bandwidth and rate are those of A100 PCIe, whose NVLink alone was cut",
    ),
    _gpu(
        "A30", "NVIDIA A30", "A30 24GB",
        box=24, gib=23.6, band=(23.5, 23.7), starts=1,
        seen="24164 MiB in id 52461638465",
        kind="HBM2", gbps=933, bf16=165, fp8=None, arch="sm_80", sources=(A30_SHEET,),
    ),
    _gpu(
        "A40", "NVIDIA A40", "A40 48GB",
        box=48, gib=44.35, band=(44.35, 47.55), starts=2,
        seen="45416 MiB in id 31224020222; 48688 MiB in id 49009830950 (ECC off)",
        kind="GDDR6", gbps=696, bf16=149.7, fp8=None, arch="sm_86", sources=(A40_SHEET,),
    ),
    _gpu(
        "A10", "NVIDIA A10", "A10 24GB",
        box=24, gib=22.06, band=(21.95, 22.2), starts=0,
        seen="estimated: nvidia-smi shows the 23028 MiB of A10G",
        kind="GDDR6", gbps=600, bf16=125, fp8=None, arch="sm_86", sources=(A10_SHEET, CHINA_TABLE),
    ),
    _gpu(
        "A10G", "NVIDIA A10G", "A10G 24GB", "g5.xlarge", "g5.2xlarge", "g5.12xlarge", "g5.48xlarge",
        box=24, gib=22.06, band=(21.98, 22.2), starts=3,
        seen=(
            "22587 MiB in id 67234836605; 22723 MiB in id 7882622645 (older driver); 21.99 in vllm- project/vllm#8073"
        ),
        kind="GDDR6", gbps=600, bf16=70, fp8=None, arch="sm_86", sources=(A10G_PAGE,),
    ),
    _gpu(
        "A16", "NVIDIA A16", "A16 16GB",
        box=16, gib=14.6, band=(14.5, 14.85), starts=0,
        seen="estimated: T4, L4 and A10G keep 0.91 to 0.92 of the box with ECC on",
        kind="GDDR6", gbps=200, bf16=17.9, fp8=None, arch="sm_86", sources=(A16_SHEET,),
        note="one of the four devices of a card",
    ),
    _gpu(
        "A2", "NVIDIA A2", "A2 16GB",
        box=16, gib=14.6, band=(14.5, 14.85), starts=0,
        seen="estimated: T4, L4 and A10G keep 0.91 to 0.92 of the box with ECC on",
        kind="GDDR6", gbps=200, bf16=18.1, fp8=None, arch="sm_86", sources=(A2_SHEET,),
    ),
    _gpu(
        "RTX A6000", "NVIDIA RTX A6000", "A6000", "RTX A6000 48GB", "A6000 48GB",
        box=48, gib=47.43, band=(44.42, 47.54), starts=3,
        seen=(
            "47.431 in id 19501943701; 48676 MiB in id 11265254500 (older driver); 44.427 in id 67541865229 (ECC on)"
        ),
        kind="GDDR6", gbps=768, bf16=154.8, fp8=None, arch="sm_86", sources=(GA102_PAPER,),
    ),
    _gpu(
        "RTX A5000", "NVIDIA RTX A5000", "A5000", "RTX A5000 24GB",
        box=24, gib=23.55, band=(23.54, 23.58), starts=2,
        seen="24114 and 24138 MiB in id 36903445345 and 29278846479",
        kind="GDDR6", gbps=768, bf16=111.1, fp8=None, arch="sm_86", sources=(RTX_A_SHEET,),
    ),
    _gpu(
        "RTX A4000", "NVIDIA RTX A4000", "A4000", "RTX A4000 16GB",
        box=16, gib=15.74, band=(15.6, 15.75), starts=2,
        seen="16117 MiB in id 14072422405 and 31365933372 (older drivers; expect about 15.6 now)",
        kind="GDDR6", gbps=448, bf16=76.7, fp8=None, arch="sm_86", sources=(RTX_A_SHEET,),
    ),
    _gpu(
        "RTX 3090 Ti", "NVIDIA GeForce RTX 3090 Ti", "3090 Ti", "RTX 3090 Ti 24GB",
        box=24, gib=23.54, band=(23.54, 23.65), starts=3,
        seen="24110, 24142 and 24214 MiB in id 53443089858, 49103026861 and 27734384543",
        kind="GDDR6X", gbps=1008, bf16=80, fp8=None, arch="sm_86", sources=(ADA_PAPER,),
    ),
    _gpu(
        "RTX 3090", "NVIDIA GeForce RTX 3090", "3090", "RTX 3090 24GB",
        box=24, gib=23.56, band=(23.55, 23.7), starts=7,
        seen=(
            "24123 to 24126 MiB in id 67251749768, 67291884450, 69122538246 and 67357488868; 23.588 in id "
            "7786494374; 23.69 in vllm-project/vllm#2140 and OpenBMB/MiniCPM-V#612 (older drivers)"
        ),
        kind="GDDR6X", gbps=936, bf16=71, fp8=None, arch="sm_86", sources=(GA102_PAPER,),
    ),
    _gpu(
        "RTX 3080 10GB", "3080 10GB", "3080-10g",
        box=10, gib=9.65, band=(9.6, 9.78), starts=0,
        seen="estimated: RTX 3060 keeps 0.97 of the box, RTX 3090 0.98",
        kind="GDDR6X", gbps=760, bf16=59.5, fp8=None, arch="sm_86", sources=(GA102_PAPER,),
    ),
    _gpu(
        "RTX 3060 12GB", "3060 12GB",
        *("NVIDIA GeForce RTX 3060", "RTX 3060", "3060"),  # chosen: the later 8 GB card is rare
        box=12, gib=11.63, band=(11.63, 11.77), starts=6,
        seen=(
            "11910 MiB in id 55688940935; 11.747 in id 15983875273; 12036 to 12045 MiB in id 70303161046, "
            "12313338942, 35246617778 and 25708303812 (older drivers)"
        ),
        kind="GDDR6", gbps=360, bf16=None, fp8=None, arch="sm_86", sources=(GEFORCE_PAGES,),
    ),
    _gpu(
        "RTX 3050 6GB", "NVIDIA GeForce RTX 3050 6GB", "3050 6GB",
        box=6, gib=5.7, band=(5.6, 5.85), starts=0,
        seen="estimated: RTX 3060 keeps 0.97 of the box, and drivers take a like amount of any size",
        kind="GDDR6", gbps=168, bf16=None, fp8=None, arch="sm_86", sources=(GEFORCE_PAGES,),
    ),
    _gpu(
        "Jetson AGX Orin 64GB", "Orin 64GB", "AGX Orin 64GB",
        box=64, gib=61.35, band=(61.3, 61.4), starts=1,
        seen="62827 MiB in id 58111358145",
        kind="LPDDR5", gbps=204.8, bf16=None, fp8=None, arch="sm_87", sources=(ORIN_SHEET,), unified=True,
        note="NVIDIA states only INT8",
    ),
)

_ADA = (
    _gpu(
        "L4", "NVIDIA L4", "L4 24GB", "g6.xlarge", "g2-standard-4",
        box=24, gib=22.03, band=(22.03, 22.17), starts=5,
        seen=(
            "22563 MiB in id 71094248218 and 59867994114; 22693 MiB in id 22905561227 and 62465390008, 22.161 "
            "in id 10982666894 (older drivers)"
        ),
        kind="GDDR6", gbps=300, bf16=121, fp8=242.5, arch="sm_89", sources=(L4_SHEET,),
    ),
    _gpu(
        "L40S", "NVIDIA L40S", "L40S 48GB", "g6e.xlarge",
        box=48, gib=44.39, band=(44.31, 44.53), starts=5,
        seen=(
            "one row of the table of starts (44.40); 44.402 and 44.392 in id 52467744867 and 71554635622; "
            "45589 MiB in id 22161947869 and 44.52 in openshift-psap/auto-tuning-vllm (older drivers)"
        ),
        kind="GDDR6", gbps=864, bf16=362.05, fp8=733, arch="sm_89", sources=(L40_SHEET,),
    ),
    _gpu(
        "L40", "NVIDIA L40", "L40 48GB",
        box=48, gib=44.4, band=(44.31, 44.53), starts=2,
        seen="44.4 in id 54572873117 and 24367190531",
        kind="GDDR6", gbps=864, bf16=181.05, fp8=362, arch="sm_89", sources=(L40_SHEET,),
    ),
    _gpu(
        "L20", "NVIDIA L20", "L20 48GB",
        box=48, gib=44.4, band=(44.31, 47.51), starts=0,
        seen="estimated: nvidia-smi shows the 46068 MiB of L40S with ECC on; 47.503 without ECC in id 3746197032",
        kind="GDDR6", gbps=864, bf16=119.5, fp8=239, arch="sm_89", sources=(CHINA_TABLE,),
    ),
    _gpu(
        "RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", "6000 Ada", "RTX 6000 Ada 48GB",
        box=48, gib=47.38, band=(47.37, 47.41), starts=2,
        seen="48520 and 48539 MiB in id 54150812406 and 18243396264",
        kind="GDDR6", gbps=960, bf16=364.25, fp8=728.5, arch="sm_89", sources=(RTX_ADA_SHEET, ADA_PAPER),
        note="about 44.4 GiB with ECC on",
    ),
    _gpu(
        "RTX 5000 Ada", "NVIDIA RTX 5000 Ada Generation", "5000 Ada", "RTX 5000 Ada 32GB",
        box=32, gib=31.5, band=(31.3, 31.65), starts=0,
        seen="estimated: RTX 6000 Ada keeps 0.987 of the box",
        kind="GDDR6", gbps=576, bf16=261.1, fp8=522.2, arch="sm_89", sources=(RTX_ADA_SHEET,),
    ),
    _gpu(
        "RTX 4090", "RTX 4090 24GB",
        *("NVIDIA GeForce RTX 4090", "4090"),  # chosen: NVIDIA sells only the 24 GB card; workshops made the other
        box=24, gib=23.52, band=(23.5, 23.65), starts=6,
        seen=(
            "23.51 to 23.527 in id 11556477136, 12562085162 and 57020041687; 23.64 to 23.65 in id 37725330874 "
            "and 16333663440, ali-vilab/VGen#104 (older drivers)"
        ),
        kind="GDDR6X", gbps=1008, bf16=165.2, fp8=330.3, arch="sm_89", sources=(ADA_PAPER,),
    ),
    _gpu(
        "RTX 4090 48GB", "4090 48GB", "4090-48g",
        box=48, gib=47.37, band=(47.37, 47.5), starts=2,
        seen="47.371 in id 51965194388; 47.499 in id 33210791296 (older driver)",
        kind="GDDR6X", gbps=None, bf16=None, fp8=None, arch="sm_89",
        sources=("readings only: a workshop's rebuild, which no maker documents",),
        note="nvidia-smi calls it NVIDIA GeForce RTX 4090",
    ),
    _gpu(
        "RTX 4080 SUPER", "NVIDIA GeForce RTX 4080 SUPER", "4080 Super",
        box=16, gib=15.56, band=(15.5, 15.7), starts=1,
        seen="15937 MiB in id 70844013997",
        kind="GDDR6X", gbps=736, bf16=None, fp8=None, arch="sm_89",
        sources=(GEFORCE_PAGES, "https://biggo.com/news/202501291423_nvidia-rtx-5080-review"),
    ),
    _gpu(
        "RTX 4080", "NVIDIA GeForce RTX 4080", "4080", "RTX 4080 16GB",
        box=16, gib=15.57, band=(15.5, 15.7), starts=0,
        seen="estimated: RTX 4080 SUPER 15.56, RTX 4060 Ti 15.57",
        kind="GDDR6X", gbps=716.8, bf16=97.5, fp8=194.9, arch="sm_89", sources=(ADA_PAPER,),
    ),
    _gpu(
        "RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4070 Ti SUPER", "4070 Ti Super",
        box=16, gib=15.57, band=(15.5, 15.7), starts=0,
        seen="estimated: RTX 4080 SUPER 15.56, RTX 4060 Ti 15.57",
        kind="GDDR6X", gbps=672, bf16=None, fp8=None, arch="sm_89", sources=(GEFORCE_PAGES,),
    ),
    _gpu(
        "RTX 4060 Ti 16GB", "4060 Ti 16GB", "4060ti-16g",
        box=16, gib=15.57, band=(15.5, 15.7), starts=1,
        seen="15.572 in id 58000313030",
        kind="GDDR6", gbps=288, bf16=None, fp8=None, arch="sm_89", sources=(CARDS_5060TI,),
    ),
)

_OLDER = (
    _gpu(
        "T4", "Tesla T4", "NVIDIA T4", "T4 16GB", "nvidia-tesla-t4", "g4dn.xlarge",
        box=16, gib=14.56, band=(14.56, 14.76), starts=6,
        seen=(
            "2 rows of the table of starts; 14913 and 14914 MiB in id 54177101839 and 17032122919; 15095 and "
            "15102 MiB in id 22394860805 and 2471683612 (older drivers)"
        ),
        kind="GDDR6", gbps=320, bf16=None, fp8=None, arch="sm_75", sources=(T4_SHEET,),
        note=NO_BF16,
    ),
    _gpu(
        "RTX 2060 12GB", "2060 12GB",
        box=12, gib=11.63, band=(11.55, 11.77), starts=0,
        seen="estimated: RTX 3060 12GB",
        kind="GDDR6", gbps=336, bf16=None, fp8=None, arch="sm_75", sources=(GEFORCE_PAGES,),
        note=NO_BF16,
    ),
    _gpu(
        "V100 SXM2 32GB", "Tesla V100-SXM2-32GB",
        *("V100 32GB", "V100-32G"),  # chosen: as much memory as PCIe, and the more common
        box=32, gib=31.74, band=(31.73, 31.75), starts=4,
        seen="32494 to 32510.5 MiB in id 66447892585, 6657715330, 56482091819 and 45450393252",
        kind="HBM2", gbps=900, bf16=None, fp8=None, arch="sm_70", sources=(V100_SHEET,),
        note=NO_BF16,
    ),
    _gpu(
        "V100 PCIe 32GB", "Tesla V100-PCIE-32GB",
        box=32, gib=31.74, band=(31.73, 31.75), starts=1,
        seen="32510.5 MiB in id 34091627320",
        kind="HBM2", gbps=900, bf16=None, fp8=None, arch="sm_70", sources=(V100_SHEET,),
        note=NO_BF16,
    ),
    _gpu(
        "V100 SXM2 16GB", "Tesla V100-SXM2-16GB",
        *("V100 16GB", "V100-16G"),  # chosen: as for 32 GB
        box=16, gib=15.77, band=(15.75, 15.79), starts=5,
        seen=(
            "3 rows of the table of starts (id 7926800416); 16144 MiB in id 70097210067; 16160.5 MiB in id 24138663228"
        ),
        kind="HBM2", gbps=900, bf16=None, fp8=None, arch="sm_70", sources=(V100_SHEET,),
        note=NO_BF16,
    ),
    _gpu(
        "V100 PCIe 16GB", "Tesla V100-PCIE-16GB",
        box=16, gib=15.77, band=(15.75, 15.79), starts=0,
        seen="estimated: the same memory as V100 SXM2 16GB",
        kind="HBM2", gbps=900, bf16=None, fp8=None, arch="sm_70", sources=(V100_SHEET,),
        note=NO_BF16,
    ),
)

_INSTINCT = (
    _gpu(
        "MI210", "AMD Instinct MI210", "MI210 64GB",
        box=64, gib=63.98, band=(63.5, 63.99), starts=0,
        seen="estimated: the same memory as one device of MI250X",
        kind="HBM2e", gbps=1638.4, bf16=181, fp8=None, arch="gfx90a", sources=(MI200_SHEET,),
    ),
    _gpu(
        "MI250X", "AMD Instinct MI250X", "AMD Instinct MI250X/MI250", "AMD Instinct MI250X / MI250", "MI250X 128GB",
        box=64, gib=63.98, band=(63.98, 63.99), starts=2,
        seen="65520 MiB in id 5556608319 and 6974116335",
        kind="HBM2e", gbps=1638.4, bf16=191.5, fp8=None, arch="gfx90a", sources=(MI200_SHEET,),
        note="one of the two devices of a card",
    ),
    _gpu(
        "MI300X", "AMD Instinct MI300X", "MI300X 192GB", "AMD Instinct MI300X OAM",
        box=192, gib=191.45, band=(191.45, 191.99), starts=3,
        seen="191.45 in one row of the table of starts; 196592 MiB in id 56905637041 and 7478549749",
        kind="HBM3", gbps=5300, bf16=1307.4, fp8=2614.9, arch="gfx942", sources=(MI300X_SHEET,),
    ),
    _gpu(
        "MI325X", "AMD Instinct MI325X", "MI325X 256GB",
        box=256, gib=255.98, band=(255.4, 255.99), starts=1,
        seen="255.98 in id 56881978410",
        kind="HBM3e", gbps=6000, bf16=1307.4, fp8=2614.9, arch="gfx942", sources=(MI325X_SHEET,),
    ),
    _gpu(
        "MI350X", "AMD Instinct MI350X", "MI350X 288GB",
        box=288, gib=287.98, band=(287.4, 287.99), starts=0,
        seen="estimated: the same memory as MI355X",
        kind="HBM3e", gbps=8000, bf16=2300, fp8=4600, arch="gfx950", sources=(MI350_SHEET,),
    ),
    _gpu(
        "MI355X", "AMD Instinct MI355X", "MI355X 288GB",
        box=288, gib=287.98, band=(287.4, 287.99), starts=2,
        seen="287.98 in id 60278261813 and 70253778748",
        kind="HBM3e", gbps=8000, bf16=2500, fp8=5000, arch="gfx950", sources=(MI350_SHEET,),
    ),
)
# fmt: on

GPUS: tuple[Gpu, ...] = _HOPPER + _BLACKWELL + _AMPERE + _ADA + _OLDER + _INSTINCT

AMBIGUOUS: tuple[Ambiguous, ...] = (
    Ambiguous(
        ("A100", "NVIDIA A100", "A100 SXM", "A100 SXM4", "A100 PCIe"),
        ("A100 SXM 80GB", "A100 SXM 40GB", "A100 PCIe 80GB", "A100 PCIe 40GB"),
        "it was sold with 40 and with 80 GB",
    ),
    Ambiguous(("V100", "V100 SXM2", "V100 PCIe"), ("V100 SXM2 32GB", "V100 SXM2 16GB"), "it was sold with 16 and with 32 GB"),
    Ambiguous(("GH200", "Grace Hopper"), ("GH200 96GB", "GH200 144GB"), "it was sold with 96 and with 144 GB"),
    Ambiguous(
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell 96GB", "PRO 6000"),
        ("RTX PRO 6000 Blackwell Server", "RTX PRO 6000 Blackwell Workstation", "RTX PRO 6000 Blackwell Max-Q"),
        "its editions differ in speed",
    ),
    Ambiguous(
        ("RTX 6000", "6000"),
        ("RTX 6000 Ada", "RTX PRO 6000 Blackwell Workstation", "RTX A6000"),
        "several generations carry the number",
    ),
    Ambiguous(("RTX 4060 Ti", "4060 Ti"), ("RTX 4060 Ti 16GB",), "an 8 GB card carries the same name"),
    Ambiguous(("RTX 5060 Ti", "5060 Ti"), ("RTX 5060 Ti 16GB",), "an 8 GB card carries the same name"),
    Ambiguous(("RTX 3080", "3080"), ("RTX 3080 10GB",), "a 12 GB card carries the same name"),
    Ambiguous(("RTX 2060", "2060"), ("RTX 2060 12GB",), "a 6 GB card carries the same name"),
    Ambiguous(("RTX 3050", "3050"), ("RTX 3050 6GB",), "an 8 GB card carries the same name"),
    Ambiguous(
        ("Orin", "Jetson Orin", "AGX Orin", "Jetson AGX Orin"),
        ("Jetson AGX Orin 64GB",),
        "modules from 4 to 64 GB carry the same name",
    ),
)
