"""A sample of a data set that is like it in lengths. Pure functions of arrays."""

import numpy as np
import numpy.typing as npt

# Strata: this many of prompt length, and in each as many of output budget.
_CLASSES = 4


def stratified(prompt: npt.ArrayLike, budget: npt.ArrayLike, seed: int) -> npt.NDArray[np.int64]:
    """An order of the rows whose first n are a stratified sample of n, for every n: each stratum has its share.

    `prompt` and `budget`: tokens of each row. So a larger sample holds the smaller ones. Which rows of a stratum come
    first is drawn by `seed`. What rows share is not looked at: rows that begin alike in small groups get torn apart.
    """
    prompts, budgets = np.asarray(prompt, np.int64), np.asarray(budget, np.int64)
    stratum = _strata(prompts, budgets)
    drawn = np.random.default_rng(seed).permutation(len(prompts))
    # Places inside of each stratum, evenly over 0..1: merged by them, all strata advance alike.
    order = np.lexsort((drawn, stratum))
    sizes = np.bincount(stratum, minlength=1)
    begins = np.concatenate(([0], np.cumsum(sizes)))[:-1]
    place = np.empty(len(prompts))
    place[order] = (np.arange(len(prompts)) - begins[stratum[order]] + 0.5) / sizes[stratum[order]]
    found: npt.NDArray[np.int64] = np.lexsort((drawn, place)).astype(np.int64)
    return found


def _strata(prompts: npt.NDArray[np.int64], budgets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    by_prompt = _classes(prompts)
    strata = by_prompt * _CLASSES
    for number in range(_CLASSES):
        own = by_prompt == number
        strata[own] += _classes(budgets[own])
    return strata


def _classes(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which quarter of the values each is in; equal ones are in the same."""
    if not len(values):
        return np.zeros(0, np.int64)
    edges = np.quantile(values, np.arange(1, _CLASSES) / _CLASSES)
    return np.searchsorted(edges, values, side="left").astype(np.int64)
