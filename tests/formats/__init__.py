"""Tests of number formats; `oracle` is the second opinion they compare with."""
