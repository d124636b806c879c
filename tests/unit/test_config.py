from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nestsp.config import RunConfig, describe_settings, load_config, parse_config, to_yaml
from nestsp.errors import ConfigError

LEAST = """
model: {config: some/folder}
data: {tokens_per_step: 8000}
planner: {max_tokens_per_rank: 2048}
train: {steps: 3}
"""


def _refusal(text: str, overrides: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_config(text, overrides, source="run.yaml")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def _changed(key: str, value: Any) -> str:
    data = yaml.safe_load(LEAST)
    section, _, name = key.rpartition(".")
    (data.setdefault(section, {}) if section else data)[name] = value
    return yaml.safe_dump(data)


def test_four_settings_are_enough() -> None:
    config = parse_config(LEAST)
    assert config.model.config == "some/folder"
    assert (config.data.tokens_per_step, config.train.steps, config.planner.max_tokens_per_rank) == (8000, 3, 2048)
    assert (config.planner.name, config.cluster.tree, config.name) == ("nsp", None, "run")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LEAST.replace("steps: 3", "step: 3"), "run.yaml: train.step is no setting; did you mean 'steps'?"),
        (LEAST + "dta: {}", "run.yaml: dta is no setting; did you mean 'data'?"),
        (
            LEAST + "zzz: {}",
            "run.yaml: zzz is no setting; known here: name, runs_dir, model, data, cluster, planner, train",
        ),
        (LEAST + "int: 3", "run.yaml: int is no setting; known here: "),
        (
            LEAST.replace("tokens_per_step", "token_per_step"),
            "data.token_per_step is no setting; did you mean 'tokens_per_step'?",
        ),
        (LEAST.replace("max_tokens_per_rank", "max_token_per_gpu"), "did you mean 'max_tokens_per_rank'?"),
        (_changed("cluster.rank", 4), "run.yaml: cluster.rank is no setting; did you mean 'ranks'?"),
    ],
)
def test_a_typo_is_named_with_the_nearest_setting(text: str, sentence: str) -> None:
    assert sentence in _refusal(text)


def test_a_typo_is_named_before_the_setting_that_it_leaves_missing() -> None:
    assert _refusal(LEAST.replace("planner:", "planer:")).startswith(
        "run.yaml: planer is no setting; did you mean 'planner'?"
    )


@pytest.mark.parametrize("section", ["model", "data", "train"])
def test_a_missing_section_is_named(section: str) -> None:
    text = "\n".join(line for line in LEAST.splitlines() if not line.startswith(section))
    assert _refusal(text) == f"run.yaml: {section} is missing, but it has no default; set it"


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.eval\.source is missing, but it has no default; set it"):
        parse_config(LEAST, ["data.eval={}"])


def test_the_planner_needs_no_setting() -> None:
    text = "\n".join(line for line in LEAST.splitlines() if not line.startswith("planner"))
    planner = parse_config(text).planner
    assert (planner.name, planner.degree, planner.max_tokens_per_rank) == ("nsp", None, None)


@pytest.mark.parametrize(("written", "num_bytes"), [("70GiB", 70 * 2**30), ("1.5 GB", 1_500_000_000), (4096, 4096)])
def test_a_memory_limit_is_bytes_or_a_text_with_a_unit(written: object, num_bytes: int) -> None:
    config = parse_config(_changed("cluster.memory_per_rank", written))
    assert config.cluster.memory_per_rank == num_bytes
    assert parse_config(to_yaml(config)) == config


@pytest.mark.parametrize("written", ["70", "70 gib", "GiB", "0GiB", "-1GiB", "all"])
def test_a_memory_limit_of_another_kind_is_refused(written: str) -> None:
    assert _refusal(_changed("cluster.memory_per_rank", written)).endswith(
        f"cluster.memory_per_rank is {written!r}, but it must be bytes or a number with a unit; write it as 70GiB, or "
        "leave it out"
    )


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("name", 3, "is 3, but it must be a valid string"),
        ("name", "../x", "is '../x', but it must match pattern"),
        ("name", "", "is '', but it must match pattern"),
        ("model.config", 3, "is 3, but it must be a valid string or it must be an object"),
        ("data.source", None, "is None, but it must be a valid string"),
        ("data.append_eos", 1, "is 1, but it must be a valid boolean"),
        ("data.append_eos", "yes", "is 'yes', but it must be a valid boolean"),
        ("data.max_length", 0, "is 0, but it must be greater than or equal to 1"),
        ("data.max_length", "8192", "is '8192', but it must be a valid integer"),
        ("data.over_length", "trim", "is 'trim', but it must be 'error', 'drop', 'truncate' or 'split'"),
        ("data.tokens_per_step", True, "is True, but it must be a valid integer"),
        ("data.tokens_per_step", 8000.0, "is 8000.0, but it must be a valid integer"),
        ("data.seed", -1, "is -1, but it must be greater than or equal to 0"),
        ("cluster.ranks", 0, "is 0, but it must be greater than or equal to 1"),
        ("cluster.tree", 4, "is 4, but it must be a valid array"),
        ("cluster.device", "gpu", "is 'gpu', but it must be 'auto', 'cpu' or 'cuda'"),
        ("cluster.timeout_s", 0, "is 0, but it must be greater than 0"),
        ("planner.max_tokens_per_rank", 0, "is 0, but it must be greater than or equal to 1"),
        ("planner.degree", -2, "is -2, but it must be greater than or equal to 1"),
        ("train.learning_rate", 0, "is 0, but it must be greater than 0"),
        ("train.learning_rate", "fast", "is 'fast', but it must be a valid number"),
        ("train.learning_rate", float("nan"), "is nan, but it must be"),
        ("train.learning_rate", float("inf"), "is inf, but it must be"),
        ("train.min_lr_ratio", 1.1, "is 1.1, but it must be less than or equal to 1"),
        ("train.beta1", 1.0, "is 1.0, but it must be less than 1"),
        ("train.weight_decay", -0.1, "is -0.1, but it must be greater than or equal to 0"),
        ("train.dtype", "fp16", "is 'fp16', but it must be 'auto', 'float32' or 'bfloat16'"),
        ("train.recompute", "on", "is 'on', but it must be a valid boolean"),
        ("train.trace_steps", [2], "is [2], but it must be the first and the last step that are traced; give both"),
        ("train.trace_steps", 2, "is 2, but it must be the first and the last step that are traced; give both"),
        ("train", 3, "is 3, but it must be an object"),
        ("train", None, "is None, but it must be an object"),
    ],
)
def test_a_wrong_type_or_value_is_refused_with_key_value_and_rule(key: str, value: Any, rule: str) -> None:
    sentence = _refusal(_changed(key, value))
    assert sentence.startswith(f"run.yaml: {key} {rule}")
    assert "more)" not in sentence


def test_two_traced_steps_are_read_and_each_is_checked() -> None:
    assert parse_config(_changed("train.trace_steps", [3, 5])).train.trace_steps == (3, 5)
    assert parse_config(_changed("train.trace_steps", None)).train.trace_steps is None
    assert "train.trace_steps.0 is 0, but it must be greater than" in _refusal(_changed("train.trace_steps", [0, 5]))


def test_one_wrong_element_of_a_list_is_named_by_its_place() -> None:
    assert _refusal(_changed("cluster.tree", [2, 1])) == (
        "run.yaml: cluster.tree.1 is 1, but it must be greater than or equal to 2"
    )


def test_further_problems_are_counted() -> None:
    text = _changed("train.steps", 0).replace("max_tokens_per_rank: 2048", "max_tokens_per_rank: x")
    assert _refusal(text).endswith("(and 1 more)")


def test_a_long_value_is_shortened() -> None:
    assert len(_refusal(_changed("train.steps", "x" * 500))) < 160


@pytest.mark.parametrize(
    ("section", "pair", "found"),
    [
        ("train", {"steps": 3, "epochs": 1}, "train has both of steps and epochs"),
        ("train", {}, "train has neither of steps and epochs"),
        ("train", {"steps": None}, "train has neither of steps and epochs"),
        (
            "data",
            {"tokens_per_step": 3, "sequences_per_step": 1},
            "data has both of tokens_per_step and sequences_per_step",
        ),
        ("data", {}, "data has neither of tokens_per_step and sequences_per_step"),
    ],
)
def test_exactly_one_of_two_settings_must_be_given(section: str, pair: dict[str, Any], found: str) -> None:
    sentence = _refusal(_changed(section, pair))
    assert sentence == (f"run.yaml: {found}, but needs exactly one; set one of them and leave the other out")


def test_either_of_two_settings_will_do() -> None:
    assert parse_config(_changed("train", {"epochs": 2})).train.epochs == 2
    assert parse_config(_changed("data", {"sequences_per_step": 4})).data.sequences_per_step == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LEAST + "name: a\nname: b\n", "run.yaml is not valid YAML: the key 'name' is there twice at line 7"),
        (LEAST.replace("steps: 3", "steps: 3, steps: 4"), "the key 'steps' is there twice at line 5"),
        ("a: [", "run.yaml is not valid YAML: "),
        ("a: b: c", "run.yaml is not valid YAML: "),
        ("\t- x", "run.yaml is not valid YAML: "),
        (LEAST + "name: !!python/name:os.system", "run.yaml is not valid YAML: "),
        (LEAST + "? [1, 2]\n: 3", "run.yaml is not valid YAML: "),
        (LEAST + "name: 2024-13-45", "run.yaml is not valid YAML: month must be in 1..12"),
        (LEAST + "name: !!int abc", "run.yaml is not valid YAML: "),
        ("[" * 5000, "run.yaml is not valid YAML: "),
        ("", "run.yaml is empty, but it must be a mapping of settings; see `nestsp config`"),
        ("# only a comment", "run.yaml is empty"),
        ("[1]", "run.yaml is a list, but it must be a mapping of settings; see `nestsp config`"),
        ("train.steps=3", "run.yaml is a str, but it must be a mapping"),
        (LEAST + "name: 2024-01-05", "run.yaml has a value that is no setting: "),
        (LEAST + "name: !!binary aGVsbG8=", "run.yaml has a value that is no setting: "),
        (LEAST + "name: !!set {a, b}", "run.yaml has a value that is no setting: "),
        (LEAST + "x: &x [*x]", "run.yaml has a value that is no setting: "),
        (LEAST + 'name: "\\ud800"', "run.yaml: the config is "),
        (LEAST + '"a\\nb": 3', r"run.yaml: 'a\nb' is no setting; known here: "),
    ],
    ids=lambda value: value[-24:],
)
def test_text_that_is_no_mapping_of_settings_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    assert sentence in _refusal(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("1E-3", 1e-3), ("2e1", 20.0), ("5.e+0", 5.0), ("3", 3.0), ("0.5", 0.5)],
)
def test_a_number_may_be_written_with_an_exponent(text: str, value: float) -> None:
    assert parse_config(LEAST.replace("steps: 3", f"steps: 3, learning_rate: {text}")).train.learning_rate == value


def test_keys_of_a_model_config_are_kept_as_they_are() -> None:
    config = parse_config(
        LEAST.replace("some/folder", "{model_type: llama, rope_parameters: {rope_theta: 1e4}, x: [1]}")
    )
    assert config.model.config == {"model_type": "llama", "rope_parameters": {"rope_theta": 10000.0}, "x": [1]}


def test_overrides_are_read_as_yaml_and_later_ones_win() -> None:
    config = parse_config(
        LEAST,
        [
            "train.steps=20",
            "train.steps=21",
            "cluster.tree=[2, 3]",
            "train.learning_rate=3e-4",
            "data.max_length=null",
            "name=a-b",
            "train.recompute=false",
        ],
    )
    assert (config.train.steps, config.cluster.tree, config.train.learning_rate) == (21, (2, 3), 3e-4)
    assert (config.data.max_length, config.name, config.train.recompute) == (None, "a-b", False)


def test_an_override_may_hold_an_equals_sign() -> None:
    assert parse_config(LEAST, ["data.source=a=b.jsonl"]).data.source == "a=b.jsonl"


def test_an_override_may_fill_a_section_that_is_absent_or_empty() -> None:
    assert parse_config(LEAST.replace("train: {steps: 3}", "train:"), ["train.steps=5"]).train.steps == 5
    assert parse_config(LEAST, ["cluster.ranks=4"]).cluster.ranks == 4


def test_an_override_may_reach_into_a_model_config() -> None:
    text = LEAST.replace("some/folder", "{model_type: llama, hidden_size: 8}")
    assert parse_config(text, ["model.config.hidden_size=16", "model.config.new.key=1"]).model.config == {
        "model_type": "llama",
        "hidden_size": 16,
        "new": {"key": 1},
    }


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.steps", "--set got 'train.steps', but it must be section.key=value, such as train.steps=20"),
        ("=3", "--set got '=3', but it must be section.key=value"),
        ("train.\nsteps=3", r"--set got 'train.\nsteps=3', but it must be section.key=value"),
        ("train..steps=3", "--set got 'train..steps=3', but it must be section.key=value"),
        ("train.step=3", "--set names train.step, but there is no such setting; did you mean 'steps'?"),
        ("tarin.steps=3", "--set names tarin, but there is no such setting; did you mean 'train'?"),
        ("zzz=3", "--set names zzz, but there is no such setting"),
        (
            "train={steps: 3}",
            "--set 'train={steps: 3}' sets a whole section, but only single settings can be set; write train.key=value",
        ),
        ("train.steps=[", "--set train.steps has the value '[', which is not valid YAML; quote it"),
        ("name=2024-13-45", "--set name has the value '2024-13-45', which is not valid YAML; quote it"),
        (
            "model.config.x=3",
            "--set names model.config.x, but config is 'some/folder' there, not a section; set config itself",
        ),
        ("train.steps=many", "run.yaml: train.steps is 'many', but it must be a valid integer"),
        ("train.epochs=2", "run.yaml: train has both of steps and epochs"),
    ],
)
def test_a_wrong_override_is_refused(override: str, sentence: str) -> None:
    assert _refusal(LEAST, [override]).startswith(sentence)


def test_a_file_is_read_and_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(LEAST, encoding="utf-8")
    assert load_config(path, ["name=x"]).name == "x"
    path.write_text(LEAST + "dta: 1")
    with pytest.raises(ConfigError, match=r"my\.yaml: dta is no setting"):
        load_config(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", "folder"])
def test_a_file_that_cannot_be_read_is_refused(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"my\.yaml.*(but there is no such file|cannot be read|but that is a folder)"):
        load_config(path)


def test_settings_cannot_be_changed_once_read() -> None:
    config = parse_config(LEAST)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 4  # type: ignore[misc]


def test_every_setting_is_described_with_type_default_and_meaning() -> None:
    rows = {key: (kind, default, meaning) for key, kind, default, meaning in describe_settings()}
    assert set(RunConfig.model_fields) <= set(rows)
    assert all(meaning for _, _, meaning in rows.values())
    assert rows["train"] == ("", "", "Optimisation, precision and saving.")
    assert rows["train.learning_rate"][:2] == ("number", "0.001")
    assert rows["planner.max_tokens_per_rank"][:2] == ("integer | null", "null")
    assert rows["cluster.memory_per_rank"][:2] == ("integer | text | null", "null")
    assert rows["cluster.tree"][:2] == ("list of integer | null", "null")
    assert rows["cluster.device"][:2] == ("auto | cpu | cuda", '"auto"')
    assert rows["model.config"][0] == "text | mapping | null"
    assert rows["data.append_eos"][:2] == ("true | false", "true")
    assert not any("<" in kind or "typing" in kind for kind, _, _ in rows.values())


def test_the_defaults_that_are_described_are_those_that_hold() -> None:
    full = yaml.safe_load(to_yaml(parse_config(LEAST)))
    for key, kind, default, _ in describe_settings():
        value: Any = full
        for part in key.split("."):
            value = value[part]
        given = yaml.safe_load(LEAST).get(key.partition(".")[0]) or {}
        if kind and default != "required" and key.rpartition(".")[2] not in given:
            assert value == json.loads(default), key


@pytest.mark.parametrize(
    ("override", "refusal"),
    [
        ("model.path=somewhere", "model has both of config and path, but needs exactly one"),
        ("train.eval_every=5", "train.eval_every is 5, but there is no data.eval to evaluate on"),
        ("train.shard_size=2", "train.shard_size is 2, but train.sharding is fsdp, which has no such choice"),
        ("train.mlp_slice_tokens=0", "train.mlp_slice_tokens is 0, but it must be greater than or equal to 1"),
        ("train.lora={rang: 4}", "train.lora.rang is no setting; did you mean 'rank'?"),
    ],
)
def test_settings_of_model_and_training_that_do_not_go_together_are_refused(override: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        parse_config(LEAST, [override])


def test_a_router_loss_that_is_off_may_be_written_as_the_sentences_say() -> None:
    assert parse_config(LEAST, ["train.router_loss=off"]).train.router_loss == "off"
    with pytest.raises(ConfigError, match=r"train\.router_loss is True, but it must be 'off', 'counting_pass' or"):
        parse_config(LEAST, ["train.router_loss=on"])


def test_offloading_without_recomputation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.offload is true, but train\.recompute is false"):
        parse_config(LEAST, ["train.offload=true", "train.recompute=false"])
