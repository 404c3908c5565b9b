"""What context parallelism cannot do, in words, before anything is sent."""

from typing import Literal

from fp4mega.attention.policy import AttentionPolicy
from fp4mega.formats import get_format

ExchangeName = Literal["all_gather", "p2p", "a2a"]
EXCHANGES: tuple[ExchangeName, ...] = ("all_gather", "p2p", "a2a")
TWO_LEVELS_REASON = (
    "two levels of groups, heads exchanged inside a node and keys around nodes, are not written; allowed: "
    + ", ".join(EXCHANGES)
)
"""Why `a2a+p2p`, which Megatron has, is refused."""

_BYTES_BACKENDS = ("auto", "reference")
_ALONG_KEYS = ("v", "v_bwd")


def backend_of(exchange: str, backend: str) -> str:
    """The backend that runs when `backend` is asked for: `auto` is the reference where bytes are exchanged."""
    return "reference" if backend == "auto" and exchange != "a2a" else backend


def explain_exchange(
    exchange: str,
    policy: AttentionPolicy,
    *,
    ranks: int,
    backend: str = "auto",
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    seqlen: int | None = None,
) -> str | None:
    """Why `ranks` ranks cannot run this exchange under this policy; None when they can.

    `num_heads` and `num_kv_heads` are those of one tensor-parallel rank, `seqlen` is the whole sequence's length; what depends
    on one that is None is not asked.
    """
    if exchange == "a2a+p2p":
        return f"cp_comm_type='a2a+p2p': {TWO_LEVELS_REASON}"
    if exchange not in EXCHANGES:
        return f"cp_comm_type={exchange!r}: allowed: {', '.join(EXCHANGES)}"
    if seqlen is not None and (seqlen == 0 or seqlen % (2 * ranks)):
        return (
            f"sequence length {seqlen}: every one of {ranks} context-parallel ranks holds two chunks of it, so it must be a "
            f"multiple of {2 * ranks}{'' if seqlen else ' above 0'}"
        )
    stochastic = policy.stochastic_operands
    if stochastic:
        return (
            f"policy={policy.name!r} rounds {', '.join(stochastic)} stochastically: bits are counted by the element's index in "
            "the whole tensor, which a rank does not hold; allowed: rounding to nearest"
        )
    if exchange == "a2a":
        return _explain_heads(policy, ranks, num_heads, num_kv_heads)
    return _explain_bytes(exchange, policy, ranks, backend, seqlen)


def _explain_heads(
    policy: AttentionPolicy, ranks: int, num_heads: int | None, num_kv_heads: int | None
) -> str | None:
    for name, heads in (("query heads", num_heads), ("kv heads", num_kv_heads)):
        if heads is not None and heads % ranks:
            return (
                f"cp_comm_type='a2a' with {heads} {name} on {ranks} context-parallel ranks: every rank takes as many whole heads, "
                f"so their number must be a multiple of {ranks}; allowed: all_gather, p2p"
            )
    across = [name for name, operand in policy.operands.items() if operand.scope == "tensor"]
    if across:
        return (
            f"cp_comm_type='a2a' with policy={policy.name!r}: {', '.join(across)} share one scale over all heads, which a2a "
            "splits over ranks; allowed: all_gather, p2p"
        )
    return None


def _explain_bytes(
    exchange: str, policy: AttentionPolicy, ranks: int, backend: str, seqlen: int | None
) -> str | None:
    if backend not in _BYTES_BACKENDS:
        return (
            f"backend={backend!r} with cp_comm_type={exchange!r}: its kernels take whole sequences of unquantized keys, not "
            "the bytes of parts; allowed: reference, auto (which is the reference here), or cp_comm_type='a2a'"
        )
    if policy.direct_p is not None and policy.direct_p.reference == "sampled":
        return (
            f"policy={policy.name!r} with cp_comm_type={exchange!r}: its row reference is sampled over the whole sequence, which "
            "no rank holds in order; allowed: a2a"
        )
    if seqlen is None:
        return None
    blocks = {n: get_format(o.format).block for n, o in policy.operands.items() if o.quantized}
    # Key tiles start at key 0 of what a rank is shown: all keys, or two chunks of them.
    names = _ALONG_KEYS if exchange == "all_gather" else (*_ALONG_KEYS, "p", "p_bwd")
    chunk = seqlen // (2 * ranks)
    for name in names:
        block = blocks.get(name)
        if block is not None and chunk % block:
            return (
                f"sequence length {seqlen} on {ranks} context-parallel ranks: {name}={policy.operands[name]} has blocks of "
                f"{block} keys, which chunks of {chunk} would cut; the length must be a multiple of {2 * ranks * block}"
            )
    return None
