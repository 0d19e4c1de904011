"""Lane: communication beside the model's own work, in one order that no clock can change."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.core.process_groups.collectives import Waiting


class Lane:
    """What is begun here runs beside the work that goes on, and is complete after ``join``.

    On CUDA it has a stream of its own, which first waits for all that the current stream has been given, so the host
    never waits and what is received is worked on as soon as it is there. On the CPU the backend's threads carry the
    messages, and what is received is worked on in ``join``. Without ``beside`` everything is done at once.
    """

    def __init__(self, device: torch.device, beside: bool) -> None:
        self._beside = beside
        self._stream = torch.cuda.Stream(device) if beside and device.type == "cuda" else None
        self._begun: list[Waiting] = []

    def begin(self, start: Callable[[], Waiting]) -> None:
        """``start()`` sets something off, what it returns completes it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                start()()
        elif self._beside:
            self._begun.append(start())
        else:
            start()()

    def join(self) -> None:
        """Complete all that was begun, in that order; on CUDA the current stream waits for it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for complete in self._begun:
            complete()
        self._begun.clear()
