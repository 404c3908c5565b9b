"""A policy names the numbers of one attention completely; the same policy is the same answer on every backend.

Seven products take part (S query rows, T key rows; names of the fields in brackets):

    forward    Z = Q K^T          [q, k]          O = P V / L      [p, v]
    backward   Z again from the saved bytes       dP = dO V^T      [do, v_bwd]
               dV = P^T dO        [p_bwd, do]     dQ = dS K        [ds, k_bwd]
               dK = dS^T Q        [ds, q_bwd]

with dS = P * (dP - r). Which P, V and r the backward uses is `backward`:

- `paper`: P = exp2(Z - LSE) unquantized, V in `v_bwd`, r = rowsum(O * dO).
- `centered`: as `paper`, but r = rowsum(P * dP), so that the rows of dS sum to zero.
- `represented`: P, V and the normalizer L exactly those that the forward multiplied. r = rowsum(O * dO) is then
  the right one, and the rows of dS sum to zero without a further product.

A name is unique: changed numbers need a changed name.
"""

from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal, get_args

from fp4mega.attention.operand import FLOAT_FORMATS, UNQUANTIZED, Operand, parse_operand

BackwardRule = Literal["paper", "centered", "represented"]
MaxRule = Literal["exact", "integer"]
Normalizer = Literal["represented", "exact"]
OPERANDS = ("q", "k", "p", "v", "do", "p_bwd", "ds", "q_bwd", "k_bwd", "v_bwd")

DIVERGENT_PV_REASON = (
    "every matched training trajectory with MXFP4 P or V diverged in the published study (64 GPUs, 8B), and the "
    "backward rules that train from 30 M to 350 M parameters and over 0.1 B tokens (docs/divergence.md) are evidence at "
    "those sizes only; P and V stay FP8 in training. Set attention.allow_divergent_pv=true to study it all the same"
)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectP:
    """Direct-P score map: E2M1 probability codes straight from scores, u = max(0, slope * x + offset).

    x is the score in log2 units relative to its 32-key block's power of two, plus log2(6). See docs/numerics.md.
    Raises ValueError naming the field that is out of its range.
    """

    slope: float
    offset: float
    exact_every: int = 0
    """Every `exact_every`-th pair of keys takes 2^x instead of the line; 0 means none."""
    reference: Literal["zero", "sampled"] = "zero"
    """Row reference m: 0, or the largest score over `samples` keys strided over the whole sequence."""
    samples: int = 32
    headroom: int = 0
    """M: the sampled reference is raised by M powers of two."""
    floor: int = 0
    """L: block exponents are lifted to at least L + 1 and then lowered by L, headroom + floor <= 126."""

    def __post_init__(self) -> None:
        for name in ("slope", "offset"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                raise ValueError(f"direct_p.{name}={value!r}: expected a finite number")
        if self.slope <= 0:
            raise ValueError(f"direct_p.slope={self.slope!r}: expected a number above 0")
        for name, least in (("exact_every", 0), ("samples", 1), ("headroom", 0), ("floor", 0)):
            value = getattr(self, name)
            if not _is_integer(value) or value < least:
                raise ValueError(
                    f"direct_p.{name}={value!r}: expected an integer of {least} or more"
                )
        if self.reference not in ("zero", "sampled"):
            raise ValueError(f"direct_p.reference={self.reference!r}: allowed: zero, sampled")
        if self.headroom + self.floor > 126:
            raise ValueError(
                f"direct_p.headroom={self.headroom}, direct_p.floor={self.floor}: their sum must not exceed 126"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPolicy:
    """Formats of the seven products, tile, maximum, normalizer and backward rule under one name.

    Raises ValueError on construction when fields contradict one another.
    """

    name: str
    q: str
    k: str
    p: str
    v: str
    do: str = "none"
    p_bwd: str = "none"
    ds: str = "none"
    q_bwd: str = "same"
    k_bwd: str = "same"
    v_bwd: str = "same"
    backward: BackwardRule = "represented"
    tile_m: int = 64
    tile_n: int = 128
    max_rule: MaxRule = "integer"
    """`exact`: the running row maximum. `integer`: its ceiling in log2 units, so rescaling is by powers of two."""
    normalizer: Normalizer = "represented"
    """L sums the represented P (what the product multiplies) or the unrounded one."""
    p_exponent: int = 8
    """FP8 P is published as P * 2^p_exponent, so that E4M3's range is used."""
    direct_p: DirectP | None = None
    operands: dict[str, Operand] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        if (
            not isinstance(self.name, str)
            or not self.name
            or any(c.isspace() or c == "/" for c in self.name)
        ):
            raise ValueError(
                f"policy name={self.name!r}: expected a non-empty string without spaces or '/'"
            )
        parsed = {
            n: parse_operand(getattr(self, n), field=f"policy {self.name!r}: {n}") for n in OPERANDS
        }
        object.__setattr__(self, "operands", parsed)
        self._check_choices()
        self._check_operands()

    def _reject(self, name: str, value: object, why: str) -> None:
        raise ValueError(f"policy {self.name!r}: {name}={value!r}: {why}")

    def _check_choices(self) -> None:
        for name, allowed in (
            ("backward", BackwardRule),
            ("max_rule", MaxRule),
            ("normalizer", Normalizer),
        ):
            if getattr(self, name) not in get_args(allowed):
                self._reject(name, getattr(self, name), f"allowed: {', '.join(get_args(allowed))}")
        for name in ("tile_m", "tile_n"):
            value = getattr(self, name)
            if not _is_integer(value) or value < 32 or value % 32:
                self._reject(name, value, "expected a positive multiple of 32 (the MXFP4 block)")
        if not _is_integer(self.p_exponent) or not 0 <= self.p_exponent <= 8:
            self._reject(
                "p_exponent",
                self.p_exponent,
                "expected an integer from 0 to 8 (2^8 is the last power under 448)",
            )

    def _check_operands(self) -> None:
        ops = self.operands
        for name in ("q", "k", "p", "v", "do", "p_bwd", "ds"):
            if ops[name].format == "same":
                self._reject(name, "same", "only q_bwd, k_bwd and v_bwd can be the forward's bytes")
        for name in ("q", "k", "v", "do", "q_bwd", "k_bwd", "v_bwd"):
            if ops[name].scope in ("tile", "unit"):
                self._reject(name, getattr(self, name), "scopes of this operand: tensor, head, row")
        for name in ("p", "p_bwd"):
            if ops[name].format in FLOAT_FORMATS and ops[name].scope != "unit":
                self._reject(
                    name,
                    getattr(self, name),
                    "FP8 P has the fixed scale 2^p_exponent; write e4m3/unit",
                )
        for name in ("v", "v_bwd"):
            if ops[name].scope == "row":
                self._reject(
                    name,
                    getattr(self, name),
                    "V is reduced along keys, so a scale per row cannot be factored out",
                )
        if ops["ds"].format not in (*UNQUANTIZED, *FLOAT_FORMATS):
            self._reject(
                "ds",
                self.ds,
                "dS is read along its rows and along its columns, so no block of it can share a scale; "
                f"allowed formats: {', '.join((*UNQUANTIZED, *FLOAT_FORMATS))}",
            )
        if ops["ds"].format in FLOAT_FORMATS and ops["ds"].scope not in ("tile", "unit"):
            self._reject("ds", self.ds, "dS exists one tile at a time; scopes: tile, unit")
        if self.backward == "represented" and self.v_bwd != "same":
            self._reject(
                "v_bwd", self.v_bwd, "the represented rule reads the forward's V; allowed: same"
            )
        if self.direct_p is not None:
            if self.p != "mxfp4_amplitude" or self.v != "mxfp4_amplitude":
                self._reject(
                    "p", self.p, "Direct-P emits mxfp4_amplitude P and multiplies mxfp4_amplitude V"
                )
            if self.backward != "represented" or self.normalizer != "represented":
                self._reject(
                    "backward",
                    self.backward,
                    "Direct-P has no unquantized P; allowed: represented, with normalizer represented",
                )

    @property
    def four_bit_pv(self) -> bool:
        """True when P or V is carried in four bits: refused in training unless allowed by name."""
        return any(self.operands[n].bits < 8 for n in ("p", "v"))

    @property
    def stochastic_operands(self) -> list[str]:
        """Names of the operands that round stochastically, so that a call needs a key to count from."""
        return [name for name, operand in self.operands.items() if operand.rounding == "stochastic"]

    def saves_input(self, name: Literal["q", "k", "v"]) -> bool:
        """True when backward needs the caller's own tensor because this operand has no quantized form."""
        return not self.operands[name if name != "v" else self.backward_v].quantized

    @property
    def backward_v(self) -> Literal["v", "v_bwd"]:
        """Which V the backward reads: the forward's (`v`) or one of its own (`v_bwd`)."""
        return "v" if self.v_bwd == "same" else "v_bwd"

    def as_dict(self) -> dict[str, Any]:
        """Plain fields, for a manifest or a recipe."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        if self.direct_p is not None:
            plain["direct_p"] = {
                f.name: getattr(self.direct_p, f.name) for f in fields(self.direct_p)
            }
        return plain


_FP8_GRADIENTS = {
    "do": "e5m2/head",
    "p_bwd": "e4m3/unit",
    "ds": "e4m3/tile",
    "q_bwd": "e4m3/head",
    "k_bwd": "e4m3/head",
}


def _training_policies() -> list[AttentionPolicy]:
    """Forward formats x backward rules. The bare name is the rule `represented`; others carry `-<rule>`."""
    cells = {
        "nvfp4_qk_fp8_pv": ("nvfp4", "e4m3/unit", "e4m3/head"),
        "mxfp4_qk_fp8_pv": ("mxfp4_rceil", "e4m3/unit", "e4m3/head"),
        "nvfp4_qk_mxfp4_pv": ("nvfp4", "mxfp4_rceil", "mxfp4_rceil"),
        "nvfp4_qk_fp8_p_mxfp4_v": ("nvfp4", "e4m3/unit", "mxfp4_rceil"),
        "nvfp4_qk_mxfp4_p_fp8_v": ("nvfp4", "mxfp4_rceil", "e4m3/head"),
    }
    made = []
    for cell, (qk, p, v) in cells.items():
        base = AttentionPolicy(name=cell, q=qk, k=qk, p=p, v=v, **_FP8_GRADIENTS)  # type: ignore[arg-type]
        made.append(base)
        v_bwd = "same" if v == "e4m3/head" else "e4m3/head"
        for rule in ("paper", "centered"):
            # P = exp2(Z - LSE) sums to one only under the normalizer of the unrounded P.
            made.append(
                replace(base, name=f"{cell}-{rule}", backward=rule, normalizer="exact", v_bwd=v_bwd)
            )
    return made


def _direct_p(name: str, direct_p: DirectP) -> AttentionPolicy:
    return AttentionPolicy(
        name=name,
        q="nvfp4",
        k="nvfp4",
        p="mxfp4_amplitude",
        v="mxfp4_amplitude",
        direct_p=direct_p,
        **_FP8_GRADIENTS,  # type: ignore[arg-type]
    )


_BUILT_IN = [
    AttentionPolicy(
        name="exact", q="none", k="none", p="none", v="none", max_rule="exact", normalizer="exact"
    ),
    AttentionPolicy(
        name="bf16",
        q="bf16",
        k="bf16",
        p="bf16",
        v="bf16",
        do="bf16",
        p_bwd="bf16",
        ds="bf16",
        backward="paper",
        max_rule="exact",
        normalizer="exact",
    ),
    *_training_policies(),
    _direct_p("direct_p_fast", DirectP(slope=1.50, offset=1.20)),
    _direct_p(
        "direct_p_accurate", DirectP(slope=1.65, offset=0.80, exact_every=4, reference="sampled")
    ),
    _direct_p(
        "direct_p_guarded",
        DirectP(
            slope=1.65,
            offset=0.80,
            exact_every=4,
            reference="sampled",
            samples=128,
            headroom=84,
            floor=18,
        ),
    ),
]

_registry: dict[str, AttentionPolicy] = {policy.name: policy for policy in _BUILT_IN}


def list_policies() -> list[str]:
    """Names of every registered policy, built in first, in the order of registration."""
    return list(_registry)


def get_policy(policy: str | AttentionPolicy) -> AttentionPolicy:
    """The policy of that name; a policy object is registered and returned. Raises ValueError with the nearest name."""
    if isinstance(policy, AttentionPolicy):
        return register_policy(policy)
    if policy not in _registry:
        near = get_close_matches(str(policy), list(_registry), n=1)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(
            f"policy={policy!r} is not registered{hint}; known: {', '.join(_registry)}"
        )
    return _registry[policy]


def register_policy(policy: AttentionPolicy) -> AttentionPolicy:
    """Make a policy known by its name. The same fields twice are fine; other fields under a taken name are an error."""
    known = _registry.setdefault(policy.name, policy)
    if known != policy:
        different = [f for f, value in policy.as_dict().items() if known.as_dict()[f] != value]
        raise ValueError(
            f"policy {policy.name!r} is already registered with other numbers ({', '.join(different)}); "
            "changed numbers need a changed name"
        )
    return known
