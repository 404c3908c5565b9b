"""Attention across ranks: context parallelism over a process group, with the numbers of one rank."""

from fp4mega.parallel.attention import context_parallel_attention
from fp4mega.parallel.checks import (
    EXCHANGES,
    TWO_LEVELS_REASON,
    ExchangeName,
    backend_of,
    explain_exchange,
)

__all__ = [
    "EXCHANGES",
    "TWO_LEVELS_REASON",
    "ExchangeName",
    "backend_of",
    "context_parallel_attention",
    "explain_exchange",
]
