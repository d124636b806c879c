"""Every setting of a run, with its meaning: one YAML file, checked once, frozen from then on.

Settings are strict: an unknown key, a text where a number belongs or a value out of range is an error that names the
key. The descriptions below are what ``nestsp config`` prints.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nestsp.errors import ConfigError, did_you_mean
from nestsp.units import parse_bytes

__all__ = [
    "ClusterConfig",
    "DataConfig",
    "DataSource",
    "LoraConfig",
    "MixturePart",
    "ModelConfig",
    "PlannerConfig",
    "RunConfig",
    "TrainConfig",
    "describe_settings",
    "load_config",
    "parse_config",
    "to_yaml",
]

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """The model: a Transformers config, from which an unmodified model is made."""

    config: str | dict[str, Any] | None = Field(
        None,
        description="to train from random weights: a Transformers model config, as the path of a config.json (or its "
        "folder), or its keys written here, model_type among them; give this or path",
    )
    path: str | None = Field(
        None,
        description="to train from given weights: the folder of a Hugging Face model, with config.json and "
        "safetensors; give this or config",
    )

    @model_validator(mode="after")
    def _one_model(self) -> ModelConfig:
        if (self.config is None) == (self.path is None):
            given = "neither" if self.config is None else "both"
            raise ValueError(
                f"model has {given} of config and path, but needs exactly one; set one of them and leave the other out"
            )
        return self

    @property
    def source(self) -> str | dict[str, Any]:
        """Where the config's keys come from: a path, or the keys themselves."""
        source = self.config if self.path is None else self.path
        assert source is not None
        return source


class DataSource(_Section):
    """Where samples come from."""

    source: str = Field(
        description="'stdlib' (each top-level function and class of the Python standard library); a .jsonl or "
        ".parquet file, or a folder of them; a folder of text files; a folder that Hugging Face datasets saved with "
        "save_to_disk; or a data set's name on the Hugging Face Hub, such as org/name",
    )
    format: Literal["auto", "text", "tokens", "chat", "prompt_completion", "preference"] = Field(
        "auto",
        description="what a row is: text ('text'), tokens ('input_ids'), chat ('messages'), prompt_completion "
        "('prompt' and 'completion') or preference ('prompt', 'chosen' and 'rejected', which are two samples); auto "
        "tells it by the columns",
    )
    split: str = Field("train", description="which split of a saved data set or of one on the Hub")
    subset: str | None = Field(None, description="which configuration of a data set on the Hub")
    revision: str | None = Field(
        None, description="commit or tag of a data set on the Hub; a whole commit needs no network once tokenised"
    )


class MixturePart(DataSource):
    """One source of a mixture."""

    weight: PositiveFloat = Field(
        1.0,
        description="passes over the source in one epoch: 2 takes every sample twice, 0.5 another half each epoch",
    )


class DataConfig(DataSource):
    """The corpus and how it becomes batches."""

    source: str = Field("stdlib", description=DataSource.model_fields["source"].description)
    mixture: tuple[MixturePart, ...] = Field(
        (),
        description="several sources instead of one, each with source, weight (passes over it in one epoch) and, if "
        "needed, format, split, subset and revision",
    )
    eval: DataSource | None = Field(
        None, description="a source for evaluation, under the same tokenizer, limit and policy; null for none"
    )
    tokenizer: str = Field(
        "bytes",
        description="'bytes' (256 tokens, one a byte), or the folder or name of a Hugging Face tokenizer; samples that "
        "are tokens already need none",
    )
    chat_template: str | None = Field(
        None, description="path of a Jinja chat template; null for the tokenizer's own. Only chats need one"
    )
    append_eos: bool = Field(
        True,
        description="end every text and every completion with the tokenizer's end-of-text token, if it has one "
        "('bytes' has none); chats end as their template says",
    )
    max_length: PositiveInt | None = Field(None, description="longest sample, in tokens; null for no limit")
    over_length: Literal["error", "drop", "truncate", "split"] = Field(
        "error",
        description="what happens to a sample that is longer than max_length: error, drop, truncate or split",
    )
    tokens_per_step: PositiveInt | None = Field(
        None,
        description="tokens of one optimizer step over all ranks: samples are taken in order until the next would "
        "exceed it (one longer sample is a step of its own); give this or sequences_per_step",
    )
    sequences_per_step: PositiveInt | None = Field(
        None, description="samples of one optimizer step over all ranks; give this or tokens_per_step"
    )
    samples_together: PositiveInt = Field(
        1,
        description="neighbouring samples that stay together: they are shuffled as one and come in one step, such as 2 "
        "for pairs of chosen and rejected answers (train.sequence_loss)",
    )
    seed: NonNegativeInt = Field(0, description="the order of samples follows from this and the epoch alone")
    workers: PositiveInt | None = Field(
        None, description="processes that tokenise; null for one a core that this process may use"
    )
    cache_dir: str = Field(".nestsp/stores", description="folder in which tokenised corpora are kept")

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        """The mixture; a single source is a mixture of one."""
        own = {name: getattr(self, name) for name in DataSource.model_fields}
        return self.mixture or (MixturePart(**own),)

    @property
    def title(self) -> str:
        """What the user calls the corpus."""
        return " + ".join(part.source for part in self.parts)

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.mixture and self.source != "stdlib":
            raise ValueError(
                f"data.source is '{self.source}', but data.mixture names sources too; put it into the mixture, or "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _one_batch_size(self) -> DataConfig:
        if (self.tokens_per_step is None) == (self.sequences_per_step is None):
            given = "neither" if self.tokens_per_step is None else "both"
            raise ValueError(
                f"data has {given} of tokens_per_step and sequences_per_step, but needs exactly one; "
                "set one of them and leave the other out"
            )
        return self

    @model_validator(mode="after")
    def _whole_runs(self) -> DataConfig:
        if self.sequences_per_step is not None and self.sequences_per_step % self.samples_together:
            raise ValueError(
                f"data.sequences_per_step is {self.sequences_per_step}, but data.samples_together is "
                f"{self.samples_together}, and a step takes whole runs of them; set it to a multiple"
            )
        if self.samples_together > 1 and self.over_length in ("drop", "split"):
            raise ValueError(
                f"data.over_length is {self.over_length}, but data.samples_together is {self.samples_together}, and a "
                f"run of them would be torn; set it to error or truncate"
            )
        return self


class ClusterConfig(_Section):
    """The ranks and what they run on."""

    ranks: PositiveInt | None = Field(
        None,
        description="ranks that `nestsp train` starts on this host; null for one a GPU, or one without GPUs. Under "
        "torchrun, torchrun's number counts, and must equal this if it is given",
    )
    tree: tuple[Annotated[int, Field(ge=2)], ...] | None = Field(
        None,
        description="fan-outs of the group tree from the root down, such as [2, 2]; null for the prime factors of the "
        "number of hosts, then of the ranks in a host",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto takes GPUs if there is one for every rank of the host"
    )
    profile: str | None = Field(
        None,
        description="cost profile that plans are made for: a preset's name or the path of a file; null for the preset "
        "of the device's name, or cpu. A run keeps the one it began with",
    )
    memory_per_rank: PositiveInt | str | None = Field(
        None,
        description="hard limit: bytes that a rank may use, or text such as 70GiB; null for 90 % of the free GPU "
        "memory, without GPUs for 70 % of the host's free memory over its ranks. A run keeps what it began with",
    )
    timeout_s: PositiveFloat = Field(
        600.0, description="seconds after which a collective that does not end is an error"
    )

    @field_validator("memory_per_rank")
    @classmethod
    def _in_bytes(cls, value: int | str | None) -> int | None:
        if isinstance(value, str):
            try:
                num_bytes = parse_bytes(value)
            except ValueError:
                num_bytes = 0
            if num_bytes < 1:
                raise ValueError(
                    f"cluster.memory_per_rank is {value!r}, but it must be bytes or a number with a unit; write it as "
                    "70GiB, or leave it out"
                )
            return num_bytes
        return value


class PlannerConfig(_Section):
    """How a batch is placed on the groups."""

    name: str = Field(
        "nsp",
        description="the planner: nsp (nested groups), static (one degree for the run), batch-adaptive (the best one "
        "for each batch), basp (one for each microbatch, by its number of sequences), flexsp (disjoint groups of "
        "several degrees, by a mixed-integer programme) or disjoint (such groups by a greedy rule)",
    )
    degree: PositiveInt | None = Field(
        None,
        description="ranks a sequence is split over, for the static planner only; null for the one with which 20 "
        "sampled batches are estimated fastest",
    )
    max_tokens_per_rank: PositiveInt | None = Field(
        None,
        description="hard cap beside the memory limit: tokens that one rank holds in one microbatch, after splitting; "
        "a sequence of 4,096 on 4 ranks needs 1,024. null for the memory limit alone",
    )
    attention: Literal["auto", "ulysses", "ring", "hybrid"] = Field(
        "auto",
        description="how groups attend: auto (for each group what the cost profile says is faster), ulysses, ring, or "
        "hybrid (a ring of ulysses members; groups of a prime number of ranks are ulysses). Models with sliding "
        "windows run as ulysses alone",
    )
    streaming: bool = Field(
        True,
        description="groups of one rank take turns, so that attention hides exchanges; false runs them one after the "
        "other and hides nothing, inside a ring and between slices of heads neither, for comparison. Results are the "
        "same",
    )


class LoraConfig(_Section):
    """Low-rank adapters, trained instead of the model's own weights."""

    rank: PositiveInt = Field(16, description="inner width of each adapter")
    alpha: PositiveFloat = Field(32.0, description="adapters are scaled by alpha / rank")
    targets: tuple[str, ...] | None = Field(
        None,
        description="linear layers that get one, by the end of their names, such as [q_proj, v_proj]; null for "
        "all but the head",
    )


class TrainConfig(_Section):
    """Optimisation, precision and saving."""

    steps: PositiveInt | None = Field(None, description="optimizer steps to run; give this or epochs")
    epochs: PositiveInt | None = Field(None, description="passes over the corpus; give this or steps")
    learning_rate: PositiveFloat = Field(1e-3, description="peak learning rate of AdamW")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="learning rate at the end of the cosine, over its peak"
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warm-up before the cosine")
    weight_decay: NonNegativeFloat = Field(
        0.1, description="AdamW's decoupled weight decay, on weights with two or more dimensions"
    )
    beta1: Fraction = Field(0.9, description="AdamW's first moment decay")
    beta2: Fraction = Field(0.95, description="AdamW's second moment decay")
    eps: PositiveFloat = Field(1e-8, description="AdamW's epsilon")
    max_grad_norm: PositiveFloat | None = Field(
        1.0, description="gradients are scaled down to this norm; null for never"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of computation; parameters, reductions and optimizer stay float32. auto: bfloat16 on GPUs, "
        "float32 on CPUs",
    )
    attention_kernel: str = Field(
        "auto",
        description="auto (the fastest that is installed: PyTorch's own, but flash-attn 3 on Hopper GPUs, and "
        "flash-attn 2 under soft caps), torch (PyTorch's own alone), flash-attn-2, flash-attn-3, or one of the Hugging "
        "Face Hub, which Transformers loads with the package kernels: kernels-community/flash-attn2 or flash-attn3",
    )
    sharding: Literal["fsdp", "hsdp", "none"] = Field(
        "fsdp",
        description="how parameters, gradients and optimizer are spread: fsdp over all ranks; hsdp over shard_size "
        "ranks, with a copy for each such group; none: every rank has all of them",
    )
    shard_size: PositiveInt | None = Field(
        None, description="for hsdp only: neighbouring ranks that share one copy; null for the ranks of a host"
    )
    recompute: bool | Literal["auto"] = Field(
        "auto",
        description="which layers are recomputed in the backward pass instead of kept: auto (as few as memory allows; "
        "the planner decides for each microbatch), true (all) or false (none)",
    )
    router_loss: Literal["off", "counting_pass", "previous_step"] = Field(
        "off",
        description="the auxiliary loss that balances a mixture of experts: counting_pass takes it over the whole "
        "batch, whatever the plan (several microbatches cost one more forward pass); previous_step balances against "
        "the batch before, which is another objective and costs nothing",
    )
    router_loss_coefficient: NonNegativeFloat | None = Field(
        None, description="factor of the auxiliary loss; null for the model config's router_aux_loss_coef"
    )
    token_loss: str | None = Field(
        None,
        description="your own loss of tokens, module:function, called as function(tokens, nll) (docs/losses.md); the "
        "module is looked for in the working directory, too. null for weight × negative log-likelihood",
    )
    sequence_loss: str | None = Field(
        None,
        description="your own loss of whole sequences, module:function, called as function(sums) (docs/losses.md); "
        "null for a loss of tokens",
    )
    reference: bool = Field(
        False,
        description="before the first step, take each sample's likelihood under the model as it is then, which "
        "sequence_loss finds in sums.reference_S (DPO); costs a forward pass over the data",
    )
    loss_kernel: Literal["auto", "torch", "liger"] = Field(
        "auto",
        description="of head and likelihoods: auto (Liger's fused kernel on GPUs, where liger-kernel is installed and "
        "the model's logits are plain or soft-capped, else PyTorch's operators), torch or liger",
    )
    loss_slice_tokens: PositiveInt = Field(
        2048, description="tokens whose logits exist at one time; smaller needs less memory"
    )
    seed: NonNegativeInt = Field(0, description="of the initial weights and of all random numbers in training")
    trace_steps: tuple[PositiveInt, PositiveInt] | None = Field(
        None,
        description="first and last step whose attention is written turn by turn, by every rank, to <run>/trace; "
        "`nestsp trace` merges them with the estimate. null for none",
    )
    lora: LoraConfig | None = Field(
        None,
        description="train low-rank adapters (rank, alpha, targets) by PEFT, and leave the model's own weights as they "
        "are; null to train all weights",
    )
    mlp_slice_tokens: PositiveInt | None = Field(
        None,
        description="tokens that go through a feed-forward block at one time, each slice recomputed in the backward "
        "pass; smaller needs less memory and more time; null for all at once",
    )
    offload: bool = Field(
        False,
        description="the inputs that recomputed layers keep lie in the host's pinned memory until their backward pass",
    )
    longest_first: bool = Field(
        False,
        description="before the first step, run a step of the data's longest samples forward and backward, and drop "
        "its gradients, so that what does not fit shows at once; losses stay what they are",
    )
    compile: bool = Field(
        False,
        description="compile the blocks of decoder layers (norms, projections, dense feed-forward blocks) by "
        "torch.compile when they first run; attention and experts stay as they are",
    )
    checkpoint_every: PositiveInt | None = Field(
        None, description="steps between checkpoints; null for one at the end only"
    )
    keep_checkpoints: PositiveInt | None = Field(
        None, description="newest checkpoints of the run that are kept; null for all"
    )
    save_in_background: bool = Field(
        True,
        description="write checkpoints while the next steps run; takes 12 bytes of host memory a parameter over all "
        "ranks",
    )
    stall_s: PositiveFloat | None = Field(
        300.0,
        description="seconds without any move in a step after which the run says where each rank is, and ends; null "
        "for never",
    )
    eval_every: PositiveInt | None = Field(
        None, description="steps between evaluations on data.eval; null for one at the end only"
    )
    export: bool = Field(True, description="write the final weights in Hugging Face format")
    tensorboard: bool = Field(False, description="write the figures of each step for TensorBoard, too")
    wandb: str | None = Field(None, description="project of Weights & Biases that gets the figures of each step, too")
    wandb_offline: bool = Field(False, description="keep them in the run's folder, for `wandb sync`")

    @field_validator("router_loss", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a plain off so

    @field_validator("trace_steps", mode="before")
    @classmethod
    def _two_steps(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, list | tuple) and len(value) == 2):
            raise ValueError(
                f"train.trace_steps is {_short(value)}, but it must be the first and the last step that are traced; "
                "give both, such as [3, 5]"
            )
        return None if value is None else tuple(value)  # what is read from JSON is a list, which strict tuples refuse

    @field_validator("attention_kernel")
    @classmethod
    def _a_known_kernel(cls, value: str) -> str:
        known = ("auto", "torch", "flash-attn-2", "flash-attn-3")
        if value not in known and not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", value):
            raise ValueError(
                f"train.attention_kernel is '{value}', but the kernels are {', '.join(known)} and those of the Hugging "
                f"Face Hub, as owner/name{did_you_mean(value, known) or '; name one of these'}"
            )
        return value

    @model_validator(mode="after")
    def _steps_in_order(self) -> TrainConfig:
        if self.trace_steps is not None and self.trace_steps[0] > self.trace_steps[1]:
            raise ValueError(
                f"train.trace_steps is {list(self.trace_steps)}, but the first step must not come after the last; "
                "swap them"
            )
        return self

    @model_validator(mode="after")
    def _one_duration(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else "both"
            raise ValueError(
                f"train has {given} of steps and epochs, but needs exactly one; set one of them and leave the other out"
            )
        if self.token_loss is not None and self.sequence_loss is not None:
            raise ValueError(
                f"train has token_loss {self.token_loss!r} and sequence_loss {self.sequence_loss!r}, but a run has one "
                "loss; leave one of them out"
            )
        if self.reference and self.sequence_loss is None:
            raise ValueError(
                "train.reference is true, but there is no train.sequence_loss that compares with it; set one, or leave "
                "train.reference out"
            )
        if self.offload and self.recompute is False:
            raise ValueError(
                "train.offload is true, but train.recompute is false, so no layer has an input of its own to offload; "
                "set train.recompute: true or auto"
            )
        if self.shard_size is not None and self.sharding != "hsdp":
            raise ValueError(
                f"train.shard_size is {self.shard_size}, but train.sharding is {self.sharding}, which has no such "
                "choice; set train.sharding: hsdp, or leave train.shard_size out"
            )
        return self

    def num_shards(self, num_ranks: int, ranks_per_host: int) -> int:
        """Pieces that each parameter is cut into.

        Raises:
            ConfigError: The ranks do not divide.
        """
        if self.sharding != "hsdp":
            return num_ranks if self.sharding == "fsdp" else 1
        size = self.shard_size or ranks_per_host
        if num_ranks % size or size in (1, num_ranks):
            raise ConfigError(
                f"train.sharding is hsdp with shards of {size} of {num_ranks} ranks, but there must be several equal "
                f"shards of several ranks; set train.shard_size to a divisor of {num_ranks} in between, or take fsdp"
            )
        return size


class RunConfig(_Section):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        "run", description="runs are written to <runs_dir>/<name>-<n>"
    )
    runs_dir: str = Field("runs", description="folder of all runs")
    model: ModelConfig
    data: DataConfig
    cluster: ClusterConfig = ClusterConfig()
    planner: PlannerConfig = PlannerConfig()
    train: TrainConfig

    @model_validator(mode="after")
    def _evaluates_something(self) -> RunConfig:
        if self.train.eval_every is not None and self.data.eval is None:
            raise ValueError(
                f"train.eval_every is {self.train.eval_every}, but there is no data.eval to evaluate on; set it, or "
                "leave train.eval_every out"
            )
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's settings from a YAML file.

    Args:
        path: The file. Paths inside it are relative to the working directory.
        overrides: ``"section.key=value"``, later ones win; values are read as YAML.

    Raises:
        ConfigError: The file is missing or no YAML mapping, or a setting is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"the config is {path}, but there is no such file; give the path of a run's YAML") from None
    except IsADirectoryError:
        raise ConfigError(f"the config is {path}, but that is a folder; give the path of a run's YAML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {path} cannot be read: {error}") from None
    return parse_config(text, overrides, source=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, source: str = "config") -> RunConfig:
    """Read a run's settings from YAML text; see `load_config`."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except _YAML_ERRORS as error:
        what = " ".join(str(error).split()).replace('in "<unicode string>", line', "at line")
        raise ConfigError(f"{source} is not valid YAML: {what}") from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{source} is {kind}, but it must be a mapping of settings; see `nestsp config`")
    for override in overrides:
        _apply_override(data, override)
    try:
        # Through JSON, so that lists may become tuples while everything else stays strict.
        return RunConfig.model_validate_json(json.dumps(data, allow_nan=True))
    except ValidationError as error:
        raise ConfigError(_sentence(error, source)) from None
    except (TypeError, ValueError) as error:  # a date, a set, a key that is no text, a list inside itself
        raise ConfigError(f"{source} has a value that is no setting: {error}; write it as text in quotes") from None


def to_yaml(config: RunConfig) -> str:
    """All settings, defaults included, as YAML that `parse_config` reads back."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def describe_settings() -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every setting, sections in order; a section has an empty type."""
    yield from _describe(RunConfig, "")


def _describe(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield key, "", "", (kind.__doc__ or "").strip()
            yield from _describe(kind, f"{key}.")
        else:
            default = "required" if field.is_required() else json.dumps(field.default)
            yield key, _type_name(kind), default, field.description or ""


def _section(kind: Any) -> type[BaseModel] | None:
    """The section that a setting's type is or holds: of ``Section``, ``Section | None`` and a list of sections."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((found for arg in typing.get_args(kind) if (found := _section(arg)) is not None), None)


def _type_name(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _type_name(args[0])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(_type_name(arg) for arg in args)
    if origin is tuple:
        return f"list of {_type_name(args[0])}"
    if origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "mapping"
    names = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "null"}
    return names.get(kind, str(kind))


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads 1e-3 as a number (YAML 1.2) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a text which `_Loader` would read as a number, and writes tuples as lists."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes keep every line break; PyYAML loses the rarer ones (U+0085) in the other styles.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )

# PyYAML lets through what a date or number that cannot be raises, and too deep a nesting.
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts) or not key.isprintable():
        raise ConfigError(f"--set got {override!r}, but it must be section.key=value, such as train.steps=20")
    try:
        parsed = yaml.load(value, Loader=_Loader)
    except _YAML_ERRORS:
        raise ConfigError(f"--set {key} has the value {value!r}, which is not valid YAML; quote it") from None
    _check_key_exists(parts, override)
    target = data
    for part in parts[:-1]:
        if target.get(part) is None:  # absent, or a section with nothing in it
            target[part] = {}
        inner = target[part]
        if not isinstance(inner, dict):
            raise ConfigError(f"--set names {key}, but {part} is {inner!r} there, not a section; set {part} itself")
        target = inner
    target[parts[-1]] = parsed


def _check_key_exists(parts: Sequence[str], override: str) -> None:
    section: type[BaseModel] = RunConfig
    for depth, part in enumerate(parts):
        fields = section.model_fields
        if part not in fields:
            place = ".".join(parts[: depth + 1])
            raise ConfigError(f"--set names {place}, but there is no such setting{did_you_mean(part, fields)}")
        kind = fields[part].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return  # the rest, if any, is inside a mapping such as model.config
        section = kind
    raise ConfigError(
        f"--set {override!r} sets a whole section, but only single settings can be set; write "
        f"{'.'.join(parts)}.key=value"
    )


def _sentence(error: ValidationError, source: str) -> str:
    """The first problem as one sentence, and how many more there are."""
    problems = error.errors(include_url=False)
    first = min(problems, key=lambda p: p["type"] != "extra_forbidden")  # a typo explains a missing key
    place = _place(first["loc"])
    value = first["input"]
    match first["type"]:
        case "extra_forbidden":
            known = _fields_at(first["loc"][:-1])
            key = ".".join(map(str, first["loc"]))
            key = key if key.isprintable() else repr(key)
            text = f"{key} is no setting{did_you_mean(str(first['loc'][-1]), known)}" + (
                "" if did_you_mean(str(first["loc"][-1]), known) else f"; known here: {', '.join(known)}"
            )
        case "missing":
            text = f"{place} is missing, but it has no default; set it"
        case "value_error":
            text = str(first["ctx"]["error"])
        case _:
            rules = [
                re.sub("^(Input|String) should", "it must", p["msg"]) for p in problems if _place(p["loc"]) == place
            ]
            text = f"{place} is {_short(value)}, but {' or '.join(dict.fromkeys(rules))}"
    more = len({_place(p["loc"]) for p in problems}) - 1  # a union has a problem for each of its types
    return f"{source}: {text}" + (f" (and {more} more)" if more else "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _place(loc: Iterable[int | str]) -> str:
    # pydantic names the branch of a union that failed ("int", "dict[str,any]"): not part of the key
    return ".".join(str(part) for part in loc if not _is_branch(part)) or "the config"


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and (part in ("bool", "int", "float", "str") or "[" in part)


def _fields_at(loc: Iterable[int | str]) -> Mapping[str, Any]:
    section: type[BaseModel] = RunConfig
    for part in loc:
        if isinstance(part, str):  # a number is a place in a list of sections
            inner = _section(section.model_fields[part].annotation)
            assert inner is not None
            section = inner
    return section.model_fields
