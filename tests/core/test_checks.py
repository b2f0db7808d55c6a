# SPDX-License-Identifier: Apache-2.0
"""Bad input gets the error that names it, before anything is launched or written."""

import pytest
import torch

import cula
from cula.core.checks import ArgumentTypeError
from cula.core.decode_checks import describe_decode
from cula.core.problem import DecodeOptions
from cula.kda.family import FAMILY as KDA
from cula.kda.problem import KdaDecodeInputs, KdaInputs, KdaOptions, check_kda


def tensors_of(arguments):
    return {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor) and t.device.type == "cpu"}


def assert_refused(function, arguments, error, *fragments):
    """The call raises `error` with a message that holds every fragment, and no tensor passed in has changed."""
    before = {name: t.clone() for name, t in tensors_of(arguments).items()}
    with torch.no_grad(), pytest.raises(error) as caught:
        function(**arguments)
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} is not in: {caught.value}"
    for name, t in tensors_of(arguments).items():
        assert torch.equal(t.nan_to_num(), before[name].nan_to_num()), f"{name} was changed by a call that was refused"


def kda_arguments(**changes):
    T, H, HV, K, V = 6, 2, 4, 8, 16
    return {
        "q": torch.randn(1, T, H, K),
        "k": torch.randn(1, T, H, K),
        "v": torch.randn(1, T, HV, V),
        "g": -torch.rand(1, T, HV, K),
        "beta": torch.rand(1, T, HV),
    } | changes


def gate(**changes):
    return {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4, 8)} | changes


KDA_CASES = {
    "q is no tensor": ({"q": [1.0]}, TypeError, ("q", "list", "torch.Tensor")),
    "q of rank 3": ({"q": torch.randn(6, 2, 8)}, ValueError, ("q", "[6, 2, 8]", "[B, T, heads, dim]")),
    "k of another shape": ({"k": torch.randn(1, 6, 2, 9)}, ValueError, ("k", "[1, 6, 2, 9]", "[1, 6, 2, 8]")),
    "v of another length": ({"v": torch.randn(1, 5, 4, 16)}, ValueError, ("v", "[1, 5, 4, 16]", "[1, 6, 4, 16]")),
    "g without its K": ({"g": torch.randn(1, 6, 4, 1)}, ValueError, ("g", "[1, 6, 4, 1]", "[B, T, HV, K]")),
    "scalar g with H heads": ({"g": torch.randn(1, 6, 2)}, ValueError, ("g", "[B, T, HV]")),
    "beta of another shape": ({"beta": torch.rand(1, 6, 2)}, ValueError, ("beta", "[1, 6, 2]", "[1, 6, 4]")),
    "HV not a multiple of H": (
        {"v": torch.randn(1, 6, 3, 16), "g": -torch.rand(1, 6, 3, 8), "beta": torch.rand(1, 6, 3)},
        ValueError,
        ("3 value heads", "2 query/key heads"),
    ),
    "float64 q": ({"q": torch.randn(1, 6, 2, 8).double()}, TypeError, ("q", "float64", "bfloat16")),
    "integer v": ({"v": torch.ones(1, 6, 4, 16, dtype=torch.int32)}, TypeError, ("v", "int32")),
    "k of another dtype": ({"k": torch.randn(1, 6, 2, 8).bfloat16()}, TypeError, ("k", "bfloat16", "float32")),
    "float64 g": ({"g": -torch.rand(1, 6, 4, 8).double()}, TypeError, ("g", "float64")),
    "boolean beta": ({"beta": torch.ones(1, 6, 4, dtype=torch.bool)}, TypeError, ("beta", "bool")),
    "mixed devices": ({"g": torch.empty(1, 6, 4, 8, device="meta")}, ValueError, ("g", "meta", "cpu")),
    "device= that is not the tensors'": ({"device": "cuda:0"}, ValueError, ("device", "cuda:0", "cpu")),
    "initial_state in bfloat16": (
        {"initial_state": torch.zeros(1, 4, 16, 8, dtype=torch.bfloat16)},
        TypeError,
        ("initial_state", "bfloat16", "float32"),
    ),
    "initial_state with V last": (
        {"initial_state": torch.zeros(1, 4, 8, 16)},
        ValueError,
        ("initial_state", "[N, HV, K, V]", "K last"),
    ),
    "initial_state for other sequences": (
        {"initial_state": torch.zeros(2, 4, 16, 8)},
        ValueError,
        ("initial_state", "[1, 4, 16, 8]"),
    ),
    "cu_seqlens as float": ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, ("cu_seqlens", "float32", "int32")),
    "cu_seqlens of rank 2": ({"cu_seqlens": torch.tensor([[0, 6]])}, ValueError, ("cu_seqlens", "[1, 2]", "[N + 1]")),
    "cu_seqlens of one offset": ({"cu_seqlens": torch.tensor([0])}, ValueError, ("cu_seqlens", "[1]")),
    "cu_seqlens with a batch": (
        {n: t.expand(2, *t.shape[1:]) for n, t in kda_arguments().items()} | {"cu_seqlens": torch.tensor([0, 6])},
        ValueError,
        ("cu_seqlens", "B == 1", "[2, 6, 2, 8]"),
    ),
    "cu_seqlens that falls": (
        {"cu_seqlens": torch.tensor([0, 4, 2, 6])},
        ValueError,
        ("cu_seqlens", "[0, 4, 2, 6]", "non-decreasing"),
    ),
    "cu_seqlens that stops early": ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, ("cu_seqlens", "T = 6")),
    "cu_seqlens that runs over": ({"cu_seqlens": torch.tensor([0, 7])}, ValueError, ("cu_seqlens", "T = 6")),
    "lower_bound of 0": (gate(lower_bound=0.0), ValueError, ("lower_bound", "0.0", "[-5, 0)")),
    "lower_bound below -5": (gate(lower_bound=-5.5), ValueError, ("lower_bound", "-5.5")),
    "lower_bound as text": (gate(lower_bound="-5"), TypeError, ("lower_bound", "str")),
    "safe_gate without a bound": (gate(safe_gate=True), ValueError, ("safe_gate", "lower_bound")),
    "in-kernel gate without A_log": (gate(A_log=None), ValueError, ("A_log",)),
    "A_log of another length": (gate(A_log=torch.zeros(2)), ValueError, ("A_log", "[2]", "[4]")),
    "A_log in float64": (gate(A_log=torch.zeros(4).double()), TypeError, ("A_log", "float64")),
    "dt_bias of another shape": (gate(dt_bias=torch.zeros(8)), ValueError, ("dt_bias", "[8]", "[4, 8]")),
    "A_log without the in-kernel gate": ({"A_log": torch.zeros(4)}, ValueError, ("A_log", "use_gate_in_kernel")),
    "allow_neg_eigval without the sigmoid": (
        {"allow_neg_eigval": True},
        ValueError,
        ("allow_neg_eigval", "use_beta_sigmoid_in_kernel"),
    ),
    "an unknown keyword": ({"chunk_sizes": 64}, TypeError, ("chunk_sizes", "torch")),
    "indices without a pool": ({"initial_state_indices": torch.tensor([0])}, ValueError, ("initial_state_indices", "state_pool")),
    "a pool without indices": ({"state_pool": torch.zeros(2, 4, 16, 8)}, ValueError, ("initial_state_indices",)),
    "a pool of another layout": (
        {"state_pool": torch.zeros(2, 4, 8, 16), "initial_state_indices": torch.tensor([0])},
        ValueError,
        ("state_pool", "[P, HV, V, K]"),
    ),
    "a pool and an initial state": (
        {
            "state_pool": torch.zeros(2, 4, 16, 8),
            "initial_state_indices": torch.tensor([0]),
            "initial_state": torch.zeros(1, 4, 16, 8),
        },
        ValueError,
        ("initial_state", "state_pool"),
    ),
    "a slot outside the pool": (
        {"state_pool": torch.zeros(2, 4, 16, 8), "initial_state_indices": torch.tensor([2])},
        ValueError,
        ("initial_state_indices", "2 slots"),
    ),
    "a slot named twice": (
        {
            "state_pool": torch.zeros(2, 4, 16, 8),
            "initial_state_indices": torch.tensor([1, 1]),
            "cu_seqlens": torch.tensor([0, 3, 6]),
        },
        ValueError,
        ("initial_state_indices", "twice"),
    ),
    "out of another shape": ({"out": torch.zeros(1, 6, 4, 8)}, ValueError, ("out", "[1, 6, 4, 16]")),
    "checkpoints without a buffer": ({"checkpoint_every": 64}, ValueError, ("checkpoint_states",)),
    "checkpoints off the chunk grid": (
        {"checkpoint_every": 63, "checkpoint_states": torch.zeros(1, 4, 16, 8)},
        ValueError,
        ("checkpoint_every", "63", "64"),
    ),
    "checkpoints nobody says which": (
        {"checkpoint_states": torch.zeros(1, 4, 16, 8)},
        ValueError,
        ("one of", "neither was given"),
    ),
    "checkpoints by two rules": (
        {"checkpoint_every": 64, "checkpoint_offsets": torch.zeros(1).int(), "checkpoint_states": torch.zeros(1, 4, 16, 8)},
        ValueError,
        ("checkpoint_every", "checkpoint_offsets", "both were given"),
    ),
    "offsets without a buffer": ({"checkpoint_offsets": torch.zeros(1).int()}, ValueError, ("checkpoint_states",)),
    "offsets in int64": (
        {"checkpoint_offsets": torch.zeros(1).long(), "checkpoint_states": torch.zeros(1, 4, 16, 8)},
        TypeError,
        ("checkpoint_offsets", "int64", "int32"),
    ),
    "offsets of other sequences": (
        {"checkpoint_offsets": torch.zeros(2).int(), "checkpoint_states": torch.zeros(2, 4, 16, 8)},
        ValueError,
        ("checkpoint_offsets", "[2]", "[N]"),
    ),
    "an offset inside of a chunk": (
        {"checkpoint_offsets": torch.tensor([5]).int(), "checkpoint_states": torch.zeros(1, 4, 16, 8)},
        ValueError,
        ("checkpoint_offsets[0] is 5", "a multiple of 64"),
    ),
    "an offset behind the end": (
        {"checkpoint_offsets": torch.tensor([64]).int(), "checkpoint_states": torch.zeros(1, 4, 16, 8)},
        ValueError,
        ("checkpoint_offsets[0] is 64", "the 6 tokens of the sequence"),
    ),
    "too few rows for offsets": (
        {"checkpoint_offsets": torch.zeros(1).int(), "checkpoint_states": torch.zeros(0, 4, 16, 8)},
        ValueError,
        ("checkpoint_states has 0 rows", "1 checkpoints"),
    ),
    "null indices by another word": ({"null_index": "zero"}, ValueError, ("null_index", "'zero'", "nonpositive")),
    "a device that there is not": ({"device": "gpu"}, ValueError, ("device is 'gpu'", "'cpu'")),
    "out whose tokens share memory": (
        {"out": torch.zeros(1, 1, 4, 16).expand(1, 6, 4, 16)},
        ValueError,
        ("out", "[1, 6, 4, 16]", "share memory", "clone"),
    ),
    "a pool whose slots share memory": (
        {"state_pool": torch.zeros(1, 4, 16, 8).expand(3, 4, 16, 8), "initial_state_indices": torch.tensor([0])},
        ValueError,
        ("state_pool", "share memory"),
    ),
}


@pytest.mark.parametrize("name", KDA_CASES)
def test_cula_kda_refuses(name):
    changes, error, fragments = KDA_CASES[name]
    assert_refused(cula.cula_kda, kda_arguments(**changes), error, "cula_kda", *fragments)


def test_a_checkpoint_buffer_that_is_too_small_is_refused():
    arguments = {n: t.repeat_interleave(22, dim=1) for n, t in kda_arguments().items()}  # 132 tokens, two checkpoints
    arguments |= {"checkpoint_every": 64, "checkpoint_states": torch.zeros(1, 4, 16, 8)}
    assert_refused(cula.cula_kda, arguments, ValueError, "checkpoint_states", "1 rows", "2 checkpoints")


GDN_CASES = {
    "gates a channel": ({"g": -torch.rand(1, 6, 4, 8)}, ValueError, ("[1, 6, 4, 8]", "cula_kda")),
    "g of H heads": ({"g": -torch.rand(1, 6, 2)}, ValueError, ("g", "[B, T, HV]")),
    "a bias a channel": (gate(dt_bias=torch.zeros(4, 8)), ValueError, ("dt_bias", "[HV]")),
    "a gate without A_log": (gate(A_log=None, dt_bias=None), ValueError, ("A_log [HV], which is None",)),
    "A_log with log decays": ({"A_log": torch.zeros(4)}, ValueError, ("A_log", "use_gate_in_kernel")),
    "a bound": ({"lower_bound": -5.0}, TypeError, ("lower_bound",)),
    "neg_eigval without sigmoid": ({"allow_neg_eigval": True}, ValueError, ("use_beta_sigmoid_in_kernel",)),
    "initial_state in float64": ({"initial_state": torch.zeros(1, 4, 16, 8).double()}, TypeError, ("initial_state", "float64")),
    "initial_state with V last": ({"initial_state": torch.zeros(1, 4, 8, 16)}, ValueError, ("initial_state", "K last")),
    "a slot outside the pool": (
        {"state_pool": torch.zeros(2, 4, 16, 8).half(), "initial_state_indices": torch.tensor([2])},
        ValueError,
        ("initial_state_indices", "2 slots"),
    ),
}


@pytest.mark.parametrize("name", GDN_CASES)
def test_cula_gdn_refuses(name):
    changes, error, fragments = GDN_CASES[name]
    arguments = kda_arguments(**{"g": -torch.rand(1, 6, 4)} | changes)
    assert_refused(cula.cula_gdn, arguments, error, "cula_gdn", *fragments)


def lightning_arguments(**changes):
    return {
        "Q": torch.randn(1, 6, 2, 8),
        "K": torch.randn(1, 6, 2, 8),
        "V": torch.randn(1, 6, 4, 16),
        "decay": torch.rand(4),
    } | changes


LIGHTNING_CASES = {
    "K of another shape": ({"K": torch.randn(1, 5, 2, 8)}, ValueError, ("K", "[1, 5, 2, 8]")),
    "decay of another length": ({"decay": torch.rand(2)}, ValueError, ("decay", "[2]", "[4]")),
    "decay in float64": ({"decay": torch.rand(4).double()}, TypeError, ("decay", "float64")),
    "HV not a multiple of H": ({"V": torch.randn(1, 6, 3, 16)}, ValueError, ("3 value heads",)),
    "an odd chunk size": ({"chunk_size": 60}, ValueError, ("chunk_size", "60")),
    "initial_state with V last": ({"initial_state": torch.zeros(1, 4, 8, 16)}, ValueError, ("initial_state", "K last")),
    "an unknown keyword": ({"persistent": True}, TypeError, ("persistent", "torch")),
    "cu_seqlens that falls": ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, ValueError, ("cu_seqlens",)),
    "a slot outside the pool": (
        {"state_pool": torch.zeros(2, 4, 16, 8), "initial_state_indices": torch.tensor([9])},
        ValueError,
        ("initial_state_indices",),
    ),
}


@pytest.mark.parametrize("name", LIGHTNING_CASES)
def test_cula_lightning_refuses(name):
    changes, error, fragments = LIGHTNING_CASES[name]
    assert_refused(cula.cula_lightning, lightning_arguments(**changes), error, "cula_lightning", *fragments)


def decode_arguments(**changes):
    N, T, H, HV, K, V = 3, 2, 2, 4, 8, 16
    return {
        "q": torch.randn(N, T, H, K),
        "k": torch.randn(N, T, H, K),
        "v": torch.randn(N, T, HV, V),
        "g": -torch.rand(N, T, HV, K),
        "beta": torch.rand(N, T, HV),
        "state": torch.randn(5, HV, V, K),
        "state_indices": torch.tensor([4, -1, 0]),
    } | changes


GATED_BY_HEAD = {"mode": "gdn", "g": -torch.rand(3, 2, 4)}
RAGGED = {"g": -torch.rand(1, 9, 4, 8), "beta": torch.rand(1, 9, 4), "v": torch.randn(1, 9, 4, 16)}
RAGGED |= {"q": torch.randn(1, 9, 2, 8), "k": torch.randn(1, 9, 2, 8)}

DECODE_CASES = {
    "an unknown mode": ({"mode": "mamba"}, ValueError, ("mode", "mamba", "lightning")),
    "an unknown null rule": ({"null_index": "zero"}, ValueError, ("null_index", "zero")),
    "an unknown layout": ({"state_layout": "kk"}, ValueError, ("state_layout", "kk")),
    "no g": ({"g": None}, ValueError, ("g=",)),
    "no beta": ({"beta": None}, ValueError, ("beta=",)),
    "decay in mode kda": ({"decay": torch.rand(4)}, ValueError, ("decay", "lightning")),
    "no decay in mode lightning": ({"mode": "lightning", "g": None, "beta": None}, ValueError, ("decay",)),
    "g in mode lightning": ({"mode": "lightning", "decay": torch.rand(4)}, ValueError, ("g=", "kda")),
    "a pool of another layout": ({"state": torch.randn(5, 4, 8, 16)}, ValueError, ("state", "[P, HV, V, K]")),
    "a pool in float64": ({"state": torch.randn(5, 4, 16, 8).double()}, TypeError, ("state", "float64")),
    "a pool with strange strides": (
        {"state": torch.randn(5, 4, 8, 16).transpose(-1, -2)},
        ValueError,
        ("state", "strides", "contiguous"),
    ),
    "no indices for a larger pool": ({"state_indices": None}, ValueError, ("5 slots", "state_indices")),
    "too few indices": ({"state_indices": torch.tensor([0, 1])}, ValueError, ("state_indices", "[2]")),
    "indices as float": ({"state_indices": torch.rand(3)}, TypeError, ("state_indices", "float32")),
    "token indices of another length": (
        {"state_indices": torch.zeros(3, 3, dtype=torch.int64)},
        ValueError,
        ("[N, T]", "[3, 2]"),
    ),
    "a slot outside the pool": ({"state_indices": torch.tensor([5, 1, 0])}, ValueError, ("state_indices", "5 slots")),
    "a slot named twice": ({"state_indices": torch.tensor([1, 1, 0])}, ValueError, ("state_indices", "twice")),
    "too many tokens": (
        {n: t.repeat_interleave(5, dim=1) for n, t in decode_arguments().items() if n in ("q", "k", "v", "g", "beta")},
        ValueError,
        ("10 tokens", "1 to 8"),
    ),
    "accepted counts with nothing to go back to": (
        {"num_accepted_tokens": torch.ones(3, dtype=torch.int32)},
        ValueError,
        ("intermediate_states",),
    ),
    "accepted counts out of range": (
        {"num_accepted_tokens": torch.tensor([0, 3, 1]), "intermediate_states": torch.zeros(3, 2, 4, 16, 8)},
        ValueError,
        ("num_accepted_tokens", "T = 2"),
    ),
    "accepted counts out of range, without indices": (
        {
            "num_accepted_tokens": torch.tensor([1, 0, 9]),
            "intermediate_states": torch.zeros(3, 2, 4, 16, 8),
            "state": torch.zeros(3, 4, 16, 8),
            "state_indices": None,
        },
        ValueError,
        ("num_accepted_tokens", "T = 2"),
    ),
    "accepted counts beyond the slots of a row": (
        {
            "num_accepted_tokens": torch.tensor([1, 0, 3]),
            "intermediate_states": torch.zeros(3, 3, 4, 16, 8),
            "state": torch.zeros(9, 4, 16, 8),
            "state_indices": torch.tensor([[0, 1], [-1, -1], [4, 5]]),
        },
        ValueError,
        ("num_accepted_tokens", "T = 2"),
    ),
    "intermediate states of another shape": (
        {"intermediate_states": torch.zeros(3, 1, 4, 16, 8)},
        ValueError,
        ("intermediate_states", "[3, 2, 4, 16, 8]"),
    ),
    "rows of a buffer without it": (
        {"intermediate_state_indices": torch.tensor([0, 1, 2])},
        ValueError,
        ("intermediate_state_indices", "intermediate_states"),
    ),
    "a row outside of the buffer": (
        {"intermediate_state_indices": torch.tensor([0, 1, 4]), "intermediate_states": torch.zeros(4, 2, 4, 16, 8)},
        ValueError,
        ("intermediate_state_indices holds 4, but intermediate_states has 4 rows (0 to 3)",),
    ),
    "a row of the buffer named twice": (
        {"intermediate_state_indices": torch.tensor([0, 1, 1]), "intermediate_states": torch.zeros(4, 2, 4, 16, 8)},
        ValueError,
        ("intermediate_state_indices names a row twice: [0, 1, 1]",),
    ),
    "offsets of a batch": ({"cu_seqlens": torch.tensor([0, 2, 4, 6])}, ValueError, ("cu_seqlens", "B == 1")),
    "offsets of other rows": (RAGGED | {"cu_seqlens": torch.tensor([0, 2, 6])}, ValueError, ("2 rows", "state_indices")),
    "a row of nine tokens": (RAGGED | {"cu_seqlens": torch.tensor([0, 9, 9, 9])}, ValueError, ("9 tokens", "up to 8")),
    "more tokens than a row has slots": (
        RAGGED | {"state_indices": torch.arange(3)[:, None], "cu_seqlens": torch.tensor([0, 2, 4, 9])},
        ValueError,
        ("5 tokens", "up to 1"),
    ),
    "offsets beyond the tokens": (RAGGED | {"cu_seqlens": torch.tensor([0, 4, 8, 12])}, ValueError, ("cu_seqlens", "9 tokens")),
    "gates a channel in mode gdn": ({"mode": "gdn"}, ValueError, ("one gate a channel", "mode='kda'")),
    "a bound in mode gdn": (GATED_BY_HEAD | {"lower_bound": -5.0}, ValueError, ("lower_bound", "'kda'")),
    "no g in mode gdn": ({"mode": "gdn", "g": None}, ValueError, ("mode 'gdn' needs g=",)),
    "out of another dtype": ({"out": torch.zeros(3, 2, 4, 16, dtype=torch.float16)}, TypeError, ("out", "float16")),
    "safe lower_bound": ({"use_gate_in_kernel": True, "lower_bound": -9.0}, ValueError, ("lower_bound", "-9.0")),
    "an unknown keyword": ({"tune": 1}, TypeError, ("tune", "torch")),
    "a device that there is not": ({"device": "gpu"}, ValueError, ("device is 'gpu'", "'cpu'")),
    "out whose rows share memory": ({"out": torch.zeros(1, 2, 4, 16).expand(3, 2, 4, 16)}, ValueError, ("out", "share memory")),
    "slots that share memory": ({"state": torch.zeros(1, 4, 16, 8).expand(5, 4, 16, 8)}, ValueError, ("state", "share memory")),
    "kept states that share memory": (
        {"intermediate_states": torch.zeros(1, 2, 4, 16, 8).expand(3, 2, 4, 16, 8)},
        ValueError,
        ("intermediate_states", "share memory"),
    ),
}


@pytest.mark.parametrize("name", DECODE_CASES)
def test_cula_decode_refuses(name):
    changes, error, fragments = DECODE_CASES[name]
    assert_refused(cula.cula_decode, decode_arguments(**changes), error, "cula_decode", *fragments)


def test_kernels_get_no_tensors_that_stand_for_their_negatives():
    def negated(*shape):
        return torch.randn(shape, dtype=torch.complex64).conj().imag

    scalar = kda_arguments(g=negated(1, 6, 4), beta=negated(1, 6, 4))
    _, x = check_kda(KdaInputs(**scalar), KdaOptions())
    given = decode_arguments(g=negated(3, 2, 4), beta=negated(3, 2, 4), A_log=negated(4), dt_bias=negated(4))
    options = DecodeOptions(use_gate_in_kernel=True)
    rows = describe_decode(KDA, KdaDecodeInputs(**given), options, None, "cula_decode").x
    assert scalar["g"].is_neg() and given["A_log"].is_neg()
    assert not any(t.is_neg() for t in (*x, *rows) if t is not None)


def test_a_wrong_dtype_is_a_value_error_too():
    assert issubclass(ArgumentTypeError, TypeError)
    assert issubclass(ArgumentTypeError, ValueError)


@pytest.mark.parametrize("text", ["0.5", b"0.5"])
def test_text_is_no_scale(text):
    for function, arguments in (
        (cula.cula_kda, kda_arguments(scale=text)),
        (cula.cula_lightning, lightning_arguments(scale=text)),
        (cula.cula_decode, decode_arguments(scale=text)),
    ):
        assert_refused(function, arguments, ArgumentTypeError, f"scale is {text!r}; expected a number")


@pytest.mark.parametrize("shape", [(3,), (1, 4, 16, 8)])
def test_a_tensor_that_is_no_scale_is_told_by_its_shape(shape):
    """As where a state stands in the place of `scale`."""
    message = f"scale is a tensor of shape {list(shape)}; expected a number"
    for function, arguments in (
        (cula.cula_kda, kda_arguments(scale=torch.zeros(shape))),
        (cula.cula_decode, decode_arguments(scale=torch.zeros(shape))),
    ):
        assert_refused(function, arguments, ArgumentTypeError, message)


def test_training_with_inference_only_arguments_is_refused():
    arguments = kda_arguments()
    arguments["q"].requires_grad_()
    pool = torch.zeros(1, 4, 16, 8)
    for extra, name in (
        ({"state_pool": pool, "initial_state_indices": torch.tensor([0])}, "state_pool"),
        ({"return_intermediate_states": True}, "return_intermediate_states"),
        ({"out": torch.zeros(1, 6, 4, 16)}, "out"),
    ):
        with pytest.raises(ValueError, match=name):
            cula.cula_kda(**arguments, **extra)
    decode = decode_arguments()
    decode["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        cula.cula_decode(**decode)


def test_a_good_decode_does_not_make_a_bad_one_pass():
    """What is remembered of a call on a CPU is for calls like it."""
    good = decode_arguments()
    with torch.no_grad():
        for _ in range(2):
            cula.cula_decode(**good)
    for change, message in (
        ({"q": good["q"].clone().requires_grad_()}, "requires grad"),
        ({"state_indices": torch.tensor([1, 1, 0])}, "names a slot twice"),
        ({"state_indices": torch.tensor([5, 1, 0])}, "5 slots"),
        ({"beta": good["beta"][:2]}, "beta has shape"),
        ({"null_index": "zero"}, "null_index"),
        ({"decay": torch.rand(4)}, "decay= belongs to mode 'lightning'"),
    ):
        with pytest.raises(ValueError, match=message):
            cula.cula_decode(**good | change)


@pytest.mark.parametrize(
    ("mode", "switch", "value"),
    [
        ("gdn", "lower_bound", -5.0),
        ("lightning", "lower_bound", -5.0),
        ("lightning", "use_gate_in_kernel", True),
        ("lightning", "use_beta_sigmoid_in_kernel", True),
        ("lightning", "allow_neg_eigval", True),
    ],
)
def test_a_decode_refuses_switches_of_gates_that_its_family_does_not_have(mode, switch, value):
    arguments = decode_arguments()
    if mode == "gdn":
        arguments["g"] = arguments["g"][..., 0]
    else:
        del arguments["g"], arguments["beta"]
        arguments["decay"] = torch.rand(4)
    cula.cula_decode(**arguments, mode=mode)
    with pytest.raises(ValueError, match=f"cula_decode: {switch}= belongs to mode 'kda'.*; mode '{mode}' does not have it"):
        cula.cula_decode(**arguments | {switch: value}, mode=mode)


CHECKED = {
    "a positive log decay": (cula.cula_kda, kda_arguments(g=torch.full((1, 6, 4, 8), 0.1)), "positive log decay"),
    "NaN in k": (cula.cula_kda, kda_arguments(k=torch.full((1, 6, 2, 8), float("nan"))), "k holds NaN"),
    "Inf in V": (cula.cula_lightning, lightning_arguments(V=torch.full((1, 6, 4, 16), float("inf"))), "v holds NaN or Inf"),
    "a negative decay": (cula.cula_lightning, lightning_arguments(decay=torch.full((4,), -0.1)), "decay"),
    "a positive log decay in decode": (cula.cula_decode, decode_arguments(g=torch.ones(3, 2, 4, 8)), "positive log decay"),
    "NaN in a decode row": (cula.cula_decode, decode_arguments(v=torch.full((3, 2, 4, 16), float("nan"))), "v holds NaN"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_cula_check_reads_values(name, monkeypatch):
    function, arguments, message = CHECKED[name]
    monkeypatch.setenv("CULA_CHECK", "1")
    assert_refused(function, arguments, ValueError, message)


def test_cula_check_lets_good_calls_pass(monkeypatch):
    monkeypatch.setenv("CULA_CHECK", "1")
    cula.cula_kda(**kda_arguments())
    cula.cula_lightning(**lightning_arguments())
    cula.cula_decode(**decode_arguments())


PADDED = {
    "rows": {},
    "rows with slots for drafts": {
        "state_indices": torch.tensor([[0, 1], [2, -1], [3, 4]]),
        "num_accepted_tokens": torch.tensor([1, 2, 0]),
    },
    "packed rows": {n: t[:, :1].transpose(0, 1) for n, t in decode_arguments().items() if n in ("q", "k", "v", "g", "beta")},
    "ragged rows": RAGGED | {"cu_seqlens": torch.tensor([0, 2, 5, 7])},
}


@pytest.mark.parametrize("kind", PADDED)
def test_cula_check_reads_no_padding(kind, monkeypatch):
    """A padded row, here the second, may hold anything, and so may tokens that are nobody's; a row that is read may not."""
    monkeypatch.setenv("CULA_CHECK", "1")
    arguments = decode_arguments(**PADDED[kind])
    padding = {"packed rows": (0, [1]), "ragged rows": (0, [2, 3, 4, 7, 8])}.get(kind, 1)
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = arguments[name].clone()
        arguments[name][padding] = float("nan") if name != "g" else 1.0
    cula.cula_decode(**arguments)
    arguments["v"][0, 0] = float("nan")
    with pytest.raises(ValueError, match="v holds NaN or Inf"):
        cula.cula_decode(**arguments)


def test_a_list_among_tensors_that_want_gradients_is_named():
    """The call goes past everything that is remembered of calls, to the check that speaks of it."""
    k, v = (torch.zeros(1, 4, 2, 8, requires_grad=True) for _ in range(2))
    with pytest.raises(TypeError, match=r"cula_gdn: q is list; expected a torch\.Tensor"):
        cula.cula_gdn([[1.0]], k, v, torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))
