"""What `launches_in_manifest` promises for Compose and Kubernetes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.command_line import EntryPoint, Launch, engine_meant
from plimsoll.launch.manifests import launches_in_manifest, plain_words
from plimsoll.vllm.versions import newest
from tests.each import cases, each

CAPTURES = Path(__file__).parent.parent / "captures" / "launches"


def captured(name: str) -> list[Launch]:
    return launches_in_manifest((CAPTURES / name).read_text(), name)


def test_a_compose_file() -> None:
    """Each service that starts vLLM is found, with defaults, merge keys and `$$` as Compose reads them."""
    assert captured("compose.yaml") == [
        Launch(
            source="compose.yaml, service llm",
            entry=EntryPoint.IMAGE,
            arguments=(
                *("--model", "Qwen/Qwen3-8B", "--port", "8000", "--gpu-memory-utilization", "0.90"),
                *("--served-model-name", "the model"),
            ),
            environment=(("HF_HUB_OFFLINE", "1"), ("HF_TOKEN", "$HF_TOKEN")),
            image="docker.io/vllm/vllm-openai:v0.11.0",
            unresolved=("HF_TOKEN",),
        ),
        Launch(
            source="compose.yaml, service small",
            entry=EntryPoint.SERVE,
            arguments=("Qwen/Qwen3-0.6B", "--max-model-len", "4096"),
            environment=(("MODEL", "Qwen/Qwen3-0.6B"), ("VLLM_LOGGING_LEVEL", "$LEVEL")),
            image="example.org/base:1",
            unresolved=("LEVEL",),
        ),
    ]


def test_a_kubernetes_stream() -> None:
    """Every container that starts vLLM is found in a stream of documents, with `$(NAME)` filled where it is known."""
    first, second, third = captured("deployment.yaml")
    assert first == Launch(
        source="deployment.yaml, Deployment llm, container vllm",
        entry=EntryPoint.IMAGE,
        arguments=(
            *("--model", "Qwen/Qwen3-8B", "--max-model-len", "1_0"),
            *("--api-key", "$API_KEY", "--revision", "$(NOWHERE)"),
        ),
        environment=(("MODEL", "Qwen/Qwen3-8B"), ("API_KEY", "$API_KEY")),
        image="vllm/vllm-openai:v0.11.0",
        unresolved=("API_KEY", "NOWHERE"),
    )
    assert second == Launch(
        source="deployment.yaml, Deployment llm, container second",
        entry=EntryPoint.SERVE,
        arguments=("Qwen/Qwen3-0.6B", "--tensor-parallel-size", "$(nvidia-smi -L | wc -l)"),
        environment=(("MODEL", "Qwen/Qwen3-0.6B"), ("VLLM_USE_V1", "1")),
        image="example.org/base:1",
        unresolved=("$(nvidia-smi -L | wc -l)",),
    )
    assert third == Launch(
        source="deployment.yaml, InferenceService kserved, model",
        entry=EntryPoint.IMAGE,
        arguments=("--max-model-len=8192",),
        notes=("the serving runtime may add arguments of its own",),
    )


def test_kserve_says_which_vllm_its_runtime_has() -> None:
    """By `runtimeVersion`, else by the image of a serving runtime in the same file; a runtime elsewhere says nothing."""
    served = "{modelFormat: {name: vLLM}, runtime: r, args: [-tp, '2']}"
    model = f"kind: InferenceService\nmetadata: {{name: n}}\nspec: {{predictor: {{model: {served}}}}}"
    image = "vllm/vllm-openai:v0.22.0"
    runtime = (
        f"kind: ServingRuntime\nmetadata: {{name: r}}\nspec: {{containers: [{{name: kserve-container, image: '{image}'}}]}}"
    )
    numbered = model.replace("runtime: r", "runtimeVersion: v0.19.1")
    for text, version in ((model, newest()), (f"{model}\n---\n{runtime}", "0.22.0"), (numbered, "0.19.1")):
        launch = launches_in_manifest(text, "x.yaml")[0]
        assert engine_meant(launch, None).release == version


@pytest.mark.parametrize("wrap", cases("launch", "containers_are_found_wherever_they_hang"))
def test_containers_are_found_wherever_they_hang(wrap: str) -> None:
    """Whatever the kind, a container list is found and labelled with the object it belongs to."""
    container = "{name: c, image: 'vllm/vllm-openai:v1', args: [--model, m]}"
    (launch,) = launches_in_manifest(wrap.replace("[C]", f"[{container}]"), "x.yaml")
    kind = "Pod" if "kind: List" in wrap else wrap.split()[1]
    assert launch.source == f"x.yaml, {kind} n, container c"
    assert launch.arguments == ("--model", "m")


@each(
    ("text", "sentence"),
    [
        *cases("launch", "bad_yaml_is_one_line"),
        ("[" * 5000, "nested deeper than 100 levels"),
        ("- " * 5000, "nested deeper than 100 levels"),
    ],
)
def test_bad_yaml_is_one_line(text: str, sentence: str) -> None:
    """What is not YAML, or not rendered yet, is BadInput with the file and, where there is one, the line."""
    with pytest.raises(BadInput, match=sentence) as caught:
        launches_in_manifest(text, "x.yaml")
    assert "\n" not in str(caught.value)


@each(
    ("text", "arguments"),
    [
        # Numbers, booleans and octal-looking values reach the arguments letter for letter.
        ("{command: [--a, 0.90, 1e3, yes, 010, 'null', null]}", ("--a", "0.90", "1e3", "yes", "010", "null")),
        # A Jinja chat template among the arguments does not make the file a Helm template.
        ("{command: [--chat-template, '{{ messages }}']}", ("--chat-template", "{{ messages }}")),
    ],
)
def test_scalars_stay_as_written(text: str, arguments: tuple[str, ...]) -> None:
    """What YAML would make of them reaches nobody; and a `sleep` in a vLLM image starts no server."""
    (launch,) = launches_in_manifest(f"services: {{a: {{image: vllm/vllm-openai, {text[1:-1]}}}}}", "x.yaml")
    assert launch.arguments == arguments
    pod = "kind: Pod\nspec: {containers: [{image: vllm/vllm-openai, command: [sleep], args: ['9']}]}"
    assert launches_in_manifest(pod, "x.yaml") == []


def test_what_envsubst_fills_in_is_not_judged() -> None:
    """`${NAME}` in a manifest is left for somebody to fill in: no value of vLLM's."""
    pod = "kind: Pod\nspec: {containers: [{image: vllm/vllm-openai, args: [m, -tp, '${TP}', '--port={{ port }}']}]}"
    assert launches_in_manifest(pod, "x.yaml")[0].unresolved == ("{{ port }}", "${TP}")


def test_a_billion_laughs_cost_no_more_than_their_text() -> None:
    """Aliases that multiply are shared, not copied, and are walked once."""
    lines = ["kind: Pod", "a0: &a0 {containers: [{image: vllm/vllm-openai}]}"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    assert len(launches_in_manifest("\n".join(lines), "x.yaml")) == 1


def test_what_multiplies_is_refused() -> None:
    """Merge keys, and variables that double with each line, end in TooLarge."""
    merges = "a0: &a0 {k0: 0}\n" + "".join(f"a{n}: &a{n} {{<<: *a{n - 1}, k{n}: 0}}\n" for n in range(1, 1000))
    doubles = "".join(f"{{name: A{n}, value: $(A{n - 1})$(A{n - 1})}}, " for n in range(1, 60))
    pod = f"kind: Pod\nspec: {{containers: [{{image: vllm, env: [{{name: A0, value: xxxx}}, {doubles}]}}]}}"
    for text in (merges, pod):
        with pytest.raises(TooLarge):
            launches_in_manifest(text, "x.yaml")


KEYS = (
    "services a image command args entrypoint env environment name value containers kind metadata model modelFormat valueFrom"
)
LEAVES = "vllm/vllm-openai|vllm serve m|$(A)|${A:-|${B:-c}|'|sh|-c|A|~|1"


@given(
    st.recursive(
        st.sampled_from(LEAVES.split("|")),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=4),
        max_leaves=20,
    )
)
def test_any_tree_is_launches_or_bad_input(tree: object) -> None:
    """Whatever stands where a string, list or mapping is expected, nothing but BadInput is raised."""
    sentence = ""
    try:
        launches_in_manifest(json.dumps(tree), "x.json")
    except BadInput as error:
        sentence = str(error)
    assert "\n" not in sentence


@given(st.text(alphabet=st.sampled_from("ab \t\n'\"\\$#=é"), max_size=20))
def test_words_are_those_of_shlex(text: str) -> None:
    """Every line is cut as `shlex.split` cuts it, and refused where it refuses."""
    try:
        expected = shlex.split(text)
    except ValueError:
        with pytest.raises(BadInput, match=r"^x: a quote or backslash in the command is never finished$"):
            plain_words(text, "x")
    else:
        assert plain_words(text, "x") == expected


def test_one_long_word_is_one_word() -> None:
    """A word of a megabyte, quoted a thousand times over, comes back whole."""
    assert plain_words("'a'b" * 250_000, "x") == ["ab" * 250_000]
