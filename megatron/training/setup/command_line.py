"""From ``sys.argv`` to a checked configuration, and from errors to exit codes.

Every process checks for itself, before torch is loaded and before it could wait for another. The first rank prints; the
others wait a moment, so that its words are not lost when the launcher ends all of them.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import (
    ConfigError,
    DamagedInputError,
    SaveFailedError,
    TrainingStoppedError,
)
from megatron.core.dist_checkpointing.folder import MARKER_FILE
from megatron.training.cli.dump import argument_dump, help_text, wants_help
from megatron.training.cli.parser import parse
from megatron.training.config.data_sources import require_data_files
from megatron.training.config.folder_rules import flag_of_written, folder_problems, package_problems
from megatron.training.config.idle import idle_notes
from megatron.training.config.manifest import used_folder_problems
from megatron.training.config.resolve import known_logical_layout, resolution_notes, resolve
from megatron.training.config.resume_rules import (
    find_source,
    require_nothing_to_load,
    require_same_model,
    resume_problems,
    with_stored_layout,
)
from megatron.training.config.run import RunConfig
from megatron.training.config.validate import config_problems, without_repeats
from megatron.training.setup.closed_pipe import outlasting_readers
from megatron.training.setup.environment import Launch, export, find_launch, rank_or_zero, read_environment
from megatron.training.setup.out_of_memory import out_of_memory
from megatron.training.setup.pinned_environment import environment_problems, values_to_set

DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
)
"""What a disk says that takes no more, and what a place that may not be written or is no file."""
INTERRUPTED = 130
"""What a shell makes of the end by SIGINT."""
WAIT_S = 3.0
"""How long a rank other than the first waits before it exits with a refusal."""
_GOES_ON = "warning: standard output is lost ({reason}); the run goes on, without the lines it would have there"


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    """What a command line and an environment come to."""

    config: RunConfig
    launch: Launch
    notes: tuple[str, ...]
    to_export: Mapping[str, str]


def start_up(argv: Sequence[str], environment: Mapping[str, str]) -> StartUp:
    """Read, resolve and check; changes nothing.

    Raises:
        ConfigError: every problem with flags, launch, environment and new folders at once, or every one with the
            checkpoint that the run would start from and the folders it would go on writing into.
        DamagedInputError: that checkpoint is missing, damaged or of another model, or data files are missing.
    """
    parsed = parse(argv)
    problems = list(parsed.problems)
    try:
        launch = find_launch(environment)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    folders = folder_problems(parsed.config, launch.rank, launch.world_size)
    asked = parsed.config.checkpoint
    source = None if folders or (asked.ckpt_step or 0) < 0 else find_source(asked)
    world_size = parsed.config.distributed.dry_run_world_size or launch.world_size
    given = with_stored_layout(parsed.config, source, world_size)
    problems += without_repeats(config_problems(given, world_size), parsed.doubtful)
    problems += environment_problems(environment, given.numerics)
    problems += folders + package_problems(parsed.config)
    if problems:
        raise ConfigError(problems)
    config = resolve(given, world_size)
    fresh: list[str] = []
    if source is None:
        fresh = require_nothing_to_load(config.checkpoint)
    else:
        require_same_model(config, source, parsed.named)
        problems = resume_problems(config, known_logical_layout(config), source)
    problems += used_folder_problems(config, source)
    if problems:
        raise ConfigError(problems)
    if config.data.given_sources():
        require_data_files(config.data)
    return StartUp(
        config=config,
        launch=launch,
        notes=(*parsed.notes, *resolution_notes(parsed.config, config), *idle_notes(parsed.named, config), *fresh),
        to_export=values_to_set(environment, config.numerics),
    )


def checked_config(argv: Sequence[str]) -> RunConfig:
    """The resolved configuration of this process; ends the process for ``--help`` and for a refusal.

    Sets the environment variables that deterministic mode needs and that are not set. The first rank prints warnings
    and the argument dump.
    """
    environment = read_environment()
    if not wants_help(argv):
        with outlasting_readers(_GOES_ON):
            return _started(argv, environment)
    if rank_or_zero(environment) == 0:
        with outlasting_readers():
            print(help_text(Path(sys.argv[0]).name))
    raise SystemExit(0)


def _started(argv: Sequence[str], environment: Mapping[str, str]) -> RunConfig:
    try:
        start = start_up(argv, environment)
    except ConfigError as error:
        local = any(problem.local for problem in error.problems)
        raise SystemExit(refuse(error, rank_or_zero(environment), local=local)) from error
    except DamagedInputError as error:
        raise SystemExit(refuse(error, rank_or_zero(environment), local=True)) from error
    export(start.to_export)
    if start.launch.rank == 0:
        for note in start.notes:
            print(f"warning: {note}", file=sys.stderr)
        further = {"rank": 0, "local_rank": start.launch.local_rank, "world_size": start.launch.world_size}
        print(argument_dump(start.config, further), flush=True)
    return start.config


def refuse(error: ConfigError | DamagedInputError, rank: int, *, local: bool = False) -> int:
    """Print the block that lists every problem, on the first rank; returns the exit code.

    The other ranks wait first. Where they are still there after it, the first rank had nothing to complain about; with
    ``local``, for what may be wrong on one machine only, they say it then.
    """
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    time.sleep(WAIT_S)
    if local:
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


@outlasting_readers(_GOES_ON)
def exit_code_of(run: Callable[[RunConfig], None], config: RunConfig) -> int:
    """Run to the end and return the exit code of the process: 0 done, 2 refused, 3 damaged input, 4 stopped by its own
    watch, 1 a checkpoint or another file that the disk did not take, or memory that is not there, 130 interrupted from
    the keyboard. Other errors are not caught: Python ends with a traceback and 1.

    What stops one rank stops all of them, and the first has the words of the one it comes from. So it speaks at once,
    and the others only where nothing has ended them meanwhile.
    """
    rank = rank_or_zero(read_environment())
    try:
        run(config)
    except ConfigError as error:
        return refuse(error, rank, local=True)
    except (DamagedInputError, SaveFailedError, TrainingStoppedError) as error:
        if rank:
            time.sleep(WAIT_S)
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is None:
            raise
        print(f"error on rank {rank}: {error}{_way_out(config, str(error.filename))}", file=sys.stderr, flush=True)
        return SaveFailedError.exit_code
    except (MemoryError, RuntimeError) as error:
        words = out_of_memory(error)
        if words is None:
            raise
        change = "a smaller model, --micro-batch-size or --seq-length, more ranks or recomputation"
        words = f"{words}; --dry-run says what a rank needs; change: {change}"
        print(f"error on rank {rank}: {words}", file=sys.stderr, flush=True)
        return SaveFailedError.exit_code
    except KeyboardInterrupt:
        how = "--exit-signal-handler --exit-signal SIGINT would finish the step and save first"
        print(f"error on rank {rank}: interrupted; {how}", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _way_out(config: RunConfig, name: str) -> str:
    """What to do where this file could not be written; nothing where no flag names its folder."""
    flag, save = flag_of_written(config, name), config.checkpoint.save
    if flag is None:
        return ""
    saved = save is not None and (Path(save) / MARKER_FILE).exists()
    go_on = f"; --load {save} goes on from the newest complete checkpoint there" if saved else ""
    return f"; change: make room there or set right what is named, or another {flag}{go_on}"
