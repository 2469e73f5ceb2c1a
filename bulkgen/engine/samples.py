"""Several answers to one request, put together. Engines compute them as requests of their own."""

from collections.abc import Sequence
from dataclasses import replace

from bulkgen.records import Completion, Sample


def together(answers: Sequence[Completion]) -> Completion:
    """The completion of a request for several answers, which are given in the order of their index.

    What the prefix cache held of the prompt is told by the answer that found the least: the others found it there
    since they have the same prompt.
    """
    tpots = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    return replace(
        answers[0],
        cached_tokens=min(answer.cached_tokens for answer in answers),
        output_tokens=sum(answer.output_tokens for answer in answers),
        queued_s=min(answer.queued_s for answer in answers),
        ttft_s=min(answer.ttft_s for answer in answers),
        tpot_s=sum(tpots) / len(tpots) if tpots else None,
        e2e_s=max(answer.e2e_s for answer in answers),
        samples=tuple(
            Sample(i, answer.text, answer.finish_reason, answer.output_tokens, answer.logprobs)
            for i, answer in enumerate(answers)
        ),
    )
