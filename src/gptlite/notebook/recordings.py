"""The book's recordings: found by their sweep, and the roof that belongs to the machine of one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptlite.hardware import find_gpu
from gptlite.record import Recording, load_recording

FOLDERS = (Path(__file__).parents[1] / "recorded", Path(__file__).parents[3] / "book" / "recorded")


def recorded(sweep: str) -> list[Recording]:
    """The book's recordings of a sweep, `SWEEP.json` first and then `SWEEP-*.json`, one for each machine.

    Raises: ValueError when there is none.
    """
    for folder in FOLDERS:
        files = [path for path in (folder / f"{sweep}.json", *sorted(folder.glob(f"{sweep}-*.json"))) if path.is_file()]
        if files:
            return [load_recording(path) for path in files]
    raise ValueError(f"the book has no recording of {sweep!r}: make one with `gptlite record {sweep}`")


def roof_of(recording: Recording, roofs: Sequence[Recording] = ()) -> tuple[float, float] | None:
    """The roof below which a recording was made: (FLOP/s, bytes/s).

    Args:
        recording: of any sweep.
        roofs: recordings of `gptlite record roof`; one of the same machine, threads and dtype counts.
    Returns: the best of its samples; else what the data sheet of a GPU promises in 16 bits; else None.
    """

    def of(one: Recording) -> tuple[Any, ...]:
        return (one.machine["name"], one.machine["threads"], one.params["dtype"])

    for roof in roofs:
        if of(roof) == of(recording):
            at = {point.at["what"]: point for point in roof.points}
            product, copy = at["matrix product"], at["copy"]
            return (product.flops or 0) / min(product.samples), (copy.bytes or 0) / min(copy.samples)
    card = find_gpu(recording.machine["name"]) if recording.machine["kind"] == "cuda" else None
    return (card.peak_flops, card.bandwidth) if card and recording.params["dtype"].endswith("float16") else None
