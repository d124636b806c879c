"""``nestsp check``: the probe of one model, and what of it runs in which kind of group. No data, no network."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from nestsp.errors import ConfigError
from nestsp.known_models import KNOWN_MODELS, known_model
from nestsp.report.banner import aligned, describe_model
from nestsp.shape import ModelShape
from nestsp.units import plural

if TYPE_CHECKING:
    from nestsp.execute.probe import Probe

__all__ = ["check_model", "features"]


def check_model(model: str) -> None:
    """Probe a model in every kind of group, and print its support table.

    Args:
        model: A known model's name, or the path of a ``config.json`` or its folder.

    Raises:
        NestspError: The model cannot be read, or is refused.
    """
    source: str | dict[str, Any] = model
    path = Path(model)
    if not path.exists():
        known_model(model)  # raises, with the names there are
        source = dict(KNOWN_MODELS[model.lower()])
    elif path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"the model is the folder {model}, but it has no config.json; give a Hugging Face model's")
    from nestsp.execute.probe import probe_model
    from nestsp.model.adapter import model_config
    from nestsp.model.derive import model_shape

    config = model_config(source)
    shape = model_shape(config)
    start = time.perf_counter()
    probe = probe_model(config)
    print(
        aligned(
            [
                ("model", [describe_model(shape)]),
                (
                    "probe",
                    [
                        f"{plural(probe.num_layers, 'layer')} of it made small: logits, loss and every gradient equal "
                        f"each sequence alone in Transformers (largest error {probe.error:.0e}); "
                        f"{time.perf_counter() - start:.1f} s"
                    ],
                ),
            ]
        )
    )
    _print_table(shape, probe)


def features(shape: ModelShape) -> list[str]:
    """What a model has that attention or loss must know of."""
    windowed = "all layers" if shape.num_window_layers == shape.num_layers else f"{shape.num_window_layers} layers"
    present = {
        "causal attention, packed": True,
        f"{shape.num_heads} query / {shape.num_kv_heads} key-value heads": shape.num_heads != shape.num_kv_heads,
        f"sliding window of {shape.window} in {windowed}": bool(shape.window),
        f"soft cap of {shape.softcap:g} on scores": bool(shape.softcap),
        "attention sinks": shape.sinks,
        f"{shape.num_experts} experts, {shape.experts_per_token} a token": bool(shape.num_moe_layers),
        "tied embeddings": shape.tied_embeddings,
    }
    return [name for name, has in present.items() if has]


def _print_table(shape: ModelShape, probe: Probe) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 100)  # the table is not cut where there is no terminal
    table = Table(box=None, pad_edge=False, header_style="")
    kinds = [*probe.errors, *probe.refusals]
    for title in ("", *kinds):
        table.add_column(title)
    for feature in features(shape):
        at_fault = feature.startswith("sliding window")  # all else would run there
        cells = ["right" if kind in probe.errors else "refused" if at_fault else "-" for kind in kinds]
        table.add_row(feature, *cells)
    console.print()
    console.print(table)
    for kind, refusal in probe.refusals.items():
        console.print(f"{kind} is refused: {refusal}")
