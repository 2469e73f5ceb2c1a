"""What an answer is worth, by what was asked: whether all of it is there, and whether it has the form asked for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bulkgen.codes import INVALID_OUTPUT, UNFINISHED_OUTPUT
from bulkgen.records import Completion, Failure
from bulkgen.spec import STRUCTURED, fits

MISSING_SAMPLES = "missing_samples"


def judged(answer: Completion, sampling: Mapping[str, Any]) -> Completion | Failure:
    """The answer with `valid` and the warnings that it deserves, or a Failure where answers are missing.

    Nothing of an answer is changed: what has not the form asked for is kept as it is, and says so.
    """
    wanted = sampling.get("n")
    if wanted is not None and [s.index for s in answer.samples] != list(range(wanted)):
        reason = f"the engine returned {len(answer.samples)} of {wanted} samples"
        return Failure(answer.index, MISSING_SAMPLES, reason, transient=True)
    form = sampling.get(STRUCTURED)
    if form is None:
        return answer
    samples = tuple(replace(s, valid=fits(s.text, form)) for s in answer.samples)
    answers = [(s.valid, s.finish_reason) for s in samples] or [(fits(answer.text, form), answer.finish_reason)]
    faults = [
        UNFINISHED_OUTPUT if reason == "length" else INVALID_OUTPUT for valid, reason in answers if valid is False
    ]
    valid = False if faults else None if any(valid is None for valid, _ in answers) else True
    warnings = (*answer.warnings, *dict.fromkeys(faults))
    return replace(answer, samples=samples, valid=valid, warnings=warnings)
