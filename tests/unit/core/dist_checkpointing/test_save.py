"""What a save says where it fails for another process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import SaveFailedError
from megatron.core.digest.bits import same_bits
from megatron.core.dist_checkpointing import writer
from megatron.core.dist_checkpointing.flat_tensor import digests_of
from megatron.core.dist_checkpointing.folder import iteration_folder, newest_iteration, part_folder, start_part
from megatron.core.dist_checkpointing.save import FolderTakenError, SaveRequest, save_checkpoint
from tests.unit.core.dist_checkpointing.test_save_and_load import ALONE, RUN, cut, load, save, whole


def test_another_process_that_saves_there_is_what_an_error_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the folder away while this one writes, or behind it, or has saved the iteration already."""
    save(tmp_path, 3)
    write, finish = writer.RankWriter.write_data, writer.RankWriter.finish

    def write_data(*args: Any, **kwargs: Any) -> object:
        start_part(tmp_path, 9)
        return write(*args, **kwargs)

    def finishing(*args: Any, **kwargs: Any) -> None:
        finish(*args, **kwargs)
        start_part(tmp_path, 9)

    words = "iter_0000004.part was taken away by another process that saves into .* belongs to one job"
    for name, taking in (("write_data", write_data), ("finish", finishing)):
        with monkeypatch.context() as patch, pytest.raises(FolderTakenError, match=words) as raised:
            patch.setattr(writer.RankWriter, name, taking)
            save(tmp_path, 4)
        assert str(raised.value).count("belongs to one job") == 1, "said once"

    def writes_there_too(*args: Any, **kwargs: Any) -> object:
        (part_folder(tmp_path, 4) / "__0_0.distcp").touch()
        return write(*args, **kwargs)

    words = r"__0_0.distcp.* belongs to one job; what was complete before is still there .* or another --save$"
    with monkeypatch.context() as patch, pytest.raises(SaveFailedError, match=words):
        patch.setattr(writer.RankWriter, "write_data", writes_there_too)
        save(tmp_path, 4)
    pieces = cut(whole())
    request = SaveRequest(
        root=tmp_path, iteration=3, pieces=pieces, digests=digests_of(pieces), facts=RUN, may_replace=False
    )
    with pytest.raises(FolderTakenError, match="iter_0000003 was saved by another process since this one began"):
        save_checkpoint(request, ALONE)
    assert same_bits(load(iteration_folder(tmp_path, 3)), whole())
    save_checkpoint(replace(request, iteration=4, facts={**RUN, "iteration": 4}), ALONE)
    assert newest_iteration(tmp_path) == 4
