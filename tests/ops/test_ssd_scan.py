"""The chunked scan against the recurrence it stands for, position by position in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.samples import Samples
from megatron.core.ops.ssd_scan import deterministic, reference
from megatron.core.ops.ssd_scan.spec import SHAPES, SPEC, sample
from tests.ops.calls import call, in_double, interpreted_unlike_reference, seeded_cases


def recurrence(x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, *, dt_bias_N, chunk_size, first_BS=None, state_BNDK=None):
    """One state update per position."""
    del chunk_size
    batch, length, heads, width = x_BSND.shape
    repeat = heads // B_BSGK.shape[2]
    B_BSNK, C_BSNK = B_BSGK.repeat_interleave(repeat, 2), C_BSGK.repeat_interleave(repeat, 2)
    dt_BSN = torch.nn.functional.softplus(dt_BSN + dt_bias_N)
    stateful = state_BNDK is not None
    if not stateful:
        state_BNDK = x_BSND.new_zeros(batch, heads, width, B_BSGK.shape[3])
    out = []
    for s in range(length):
        if first_BS is not None:
            state_BNDK = torch.where(first_BS[:, s, None, None, None], 0.0, state_BNDK)
        decay_BN = torch.exp(-torch.exp(A_log_N) * dt_BSN[:, s])
        step_BND = x_BSND[:, s] * dt_BSN[:, s, :, None]
        state_BNDK = state_BNDK * decay_BN[..., None, None] + step_BND[..., None] * B_BSNK[:, s, :, None]
        out.append((state_BNDK * C_BSNK[:, s, :, None]).sum(-1) + D_N[:, None] * x_BSND[:, s])
    y_BSND = torch.stack(out, dim=1)
    return (y_BSND, state_BNDK) if stateful else y_BSND


def _leaves(shape, dtype, **named):
    draw = Samples(torch.Generator().manual_seed(3), torch.float32, torch.device("cpu"))
    args, kwargs = sample(draw, shape, **named)
    args = [a.to(dtype).requires_grad_() for a in args]
    return args, kwargs | {"dt_bias_N": kwargs["dt_bias_N"].to(dtype).requires_grad_()}


def _values_and_grads(fn, args, kwargs):
    y = fn(*args, **kwargs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad(y, [*args, kwargs["dt_bias_N"]], dy)]


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0]], ids=str)
def test_chunks_equal_the_recurrence(shape):
    args, kwargs = _leaves(shape, torch.float64)
    got, want = (_values_and_grads(fn, args, kwargs) for fn in (reference.ssd_scan, recurrence))
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("chunk", [1, 5, 37, 64])
def test_the_chunk_size_does_not_matter(chunk):
    args, kwargs = _leaves(SHAPES[0], torch.float64)
    got = reference.ssd_scan(*args, **(kwargs | {"chunk_size": chunk}))
    torch.testing.assert_close(got, recurrence(*args, **kwargs), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("fn", [reference.ssd_scan, deterministic.ssd_scan])
def test_decays_of_a_thousand_steps_keep_their_digits(fn):
    """Steps that forget everything come first; the small decays after them are as accurate as without them."""
    args, kwargs = _leaves((1, 128, 2, 4, 1, 4, 128), torch.float32, A_high=0.0)
    with torch.no_grad():
        args[1][:, :64], args[1][:, 64:] = 200.0, -6.0
    double = [a.detach().double() for a in args]
    want = recurrence(*double, **(kwargs | {"dt_bias_N": kwargs["dt_bias_N"].double()}))
    torch.testing.assert_close(fn(*args, **kwargs).double(), want, rtol=1e-5, atol=1e-3)
    late = fn(*args, **kwargs)[:, 66:].double()
    torch.testing.assert_close(late, want[:, 66:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fn", [reference.ssd_scan, deterministic.ssd_scan])
@pytest.mark.parametrize(("shift", "high"), [(60.0, 20.0), (-100.0, 5.0)])
def test_extreme_steps_stay_finite(fn, shift, high):
    args, kwargs = _leaves((1, 21, 2, 4, 1, 3, 8), torch.float32, dt_shift=shift, A_high=high)
    assert all(bool(t.isfinite().all()) for t in _values_and_grads(fn, args, kwargs))


def _cases():
    cases = seeded_cases(SPEC, torch.float32, torch.device("cpu"))
    return {c.name: in_double(c) for c in cases if c.name in ("states", "sequences", "sequences-and-states")}


@pytest.mark.parametrize("name", ["states", "sequences", "sequences-and-states"])
def test_states_and_sequences_equal_the_recurrence(name):
    got, want = (call(fn, _cases()[name]).tensors() for fn in (reference.ssd_scan, recurrence))
    assert len(got) == len(want) == {"states": 10, "sequences": 8, "sequences-and-states": 10}[name]
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("fn", [reference.ssd_scan, deterministic.ssd_scan])
def test_a_sequence_sees_nothing_of_what_lies_before_it_and_a_state_goes_on_where_it_was(fn):
    """And the control: without the mark, or the state, it does make a difference."""
    args, kwargs = _leaves((1, 48, 4, 6, 2, 5, 16), torch.float32)
    early, late = ([a[:, part] if a.dim() > 1 else a for a in args] for part in (slice(16), slice(16, None)))
    first = torch.zeros(1, 48, dtype=torch.bool)
    first[0, 16] = True
    alone, behind = fn(*late, **kwargs), fn(*args, **kwargs)[:, 16:]
    torch.testing.assert_close(fn(*args, **kwargs, first_BS=first)[:, 16:], alone, rtol=1e-5, atol=1e-5)
    _, state = fn(*early, **kwargs, state_BNDK=torch.zeros(1, 4, 6, 5))
    torch.testing.assert_close(fn(*late, **kwargs, state_BNDK=state)[0], behind, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(alone, behind, rtol=1e-3)


@pytest.mark.parametrize(
    "other", [{"first_BS": torch.ones(1, 7, dtype=torch.bool)}, {"state_BNDK": torch.zeros(6, 4, 5)}]
)
@pytest.mark.parametrize("variant", ["deterministic", "deterministic_triton"])
def test_what_does_not_fit_is_refused(variant, other):
    fn = pytest.importorskip(f"megatron.core.ops.ssd_scan.{variant}").ssd_scan
    args, kwargs = _leaves((2, 7, 4, 6, 2, 5, 4), torch.float32)
    with pytest.raises(ValueError, match=f"{next(iter(other))} is .*, it has to be"):
        fn(*args, **kwargs, **other)


def test_the_kernels_are_close_to_the_reference_where_they_are_interpreted():
    """One case with everything; all of them on GPUs."""
    pytest.importorskip("triton")
    assert interpreted_unlike_reference("ssd_scan", "small") == ["[]"]


def test_an_empty_sequence_has_empty_outputs():
    args, kwargs = _leaves((2, 0, 2, 4, 1, 3, 8), torch.float32)
    for fn in (reference.ssd_scan, deterministic.ssd_scan):
        assert fn(*args, **kwargs).shape == (2, 0, 2, 4)


def test_a_recurrence_with_a_wrong_head_map_is_noticed():
    """Control: the oracle tells heads' groups apart."""
    args, kwargs = _leaves(SHAPES[0], torch.float64)
    swapped = [*args[:3], args[3].flip(2), *args[4:]]
    assert not torch.allclose(reference.ssd_scan(*args, **kwargs), recurrence(*swapped, **kwargs), rtol=1e-3)


@pytest.mark.gpu
def test_many_heads_on_one_b_and_c_share_their_gradients():
    """32 heads of one group: the kernel adds pairs of positions over the heads before it multiplies by B and C."""
    triton_variant = pytest.importorskip("megatron.core.ops.ssd_scan.deterministic_triton")
    draw = Samples(torch.Generator().manual_seed(11), torch.bfloat16, torch.device("cpu"))
    x, dt = draw.normal(1, 150, 32, 64), draw.normal(1, 150, 32)
    A_log, D, bias = (draw.normal(32, fp32=True) for _ in range(3))
    B, C = draw.normal(1, 150, 1, 128), draw.normal(1, 150, 1, 128)

    def run(fn, change):
        leaves = [change(t).requires_grad_() for t in (x, dt, A_log, B, C, D, bias - 3.0)]
        return _values_and_grads(fn, leaves[:-1], {"dt_bias_N": leaves[-1], "chunk_size": 64})

    want, got = run(reference.ssd_scan, torch.Tensor.double), run(triton_variant.ssd_scan, torch.Tensor.cuda)
    for name, left, right in zip(["y", "x", "dt", "A_log", "B", "C", "D", "bias"], got, want, strict=True):
        size = float(right.abs().max())
        assert float((left.double().cpu() - right).abs().max().detach()) < 2e-2 * size, name
