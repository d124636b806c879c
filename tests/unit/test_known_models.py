from __future__ import annotations

import pytest

from nestsp.errors import ConfigError, ModelError
from nestsp.known_models import KNOWN_MODELS, known_model
from nestsp.shape import FAMILIES, ModelShape

# Parameters that the models' public weights have, tied ones once.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "granite-3-8b": 8_170_848_256,
    "command-r": 34_980_831_232,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_has_the_published_number_of_parameters(name: str) -> None:
    assert known_model(name).num_parameters == PUBLISHED[name]


def test_active_parameters_give_the_moe_models_their_names() -> None:
    assert known_model("qwen3-30b-a3b").num_active_parameters == pytest.approx(3e9, rel=0.05)
    assert known_model("qwen3-235b-a22b").num_active_parameters == pytest.approx(22e9, rel=0.05)
    assert known_model("gpt-oss-20b").num_active_parameters == pytest.approx(3.6e9, rel=0.05)
    assert known_model("gpt-oss-120b").num_active_parameters == pytest.approx(5.1e9, rel=0.1)


@pytest.mark.parametrize(("name", "billion"), [("gpt-7b", 7.117), ("gpt-13b", 13.116), ("gpt-30b", 31.525)])
def test_flexsp_models_have_about_the_parameters_that_its_authors_state(name: str, billion: float) -> None:
    # Theirs at 192K; their vocabulary and how positions are counted are not stated.
    assert known_model(name).num_parameters / 1e9 == pytest.approx(billion, rel=0.07)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_name_is_read_in_any_case(name: str) -> None:
    assert known_model(name.upper()) == known_model(name)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'qwen3-30b-a3b'"):
        known_model("qwen3-30b-3b")


def test_what_can_only_be_planned_is_still_refused_for_training() -> None:
    planned_only = [config for config in KNOWN_MODELS.values() if config["model_type"] not in FAMILIES]
    assert planned_only
    for config in planned_only:
        with pytest.raises(ModelError, match="nestsp runs"):
            ModelShape.from_hf_config(config)
