"""Scores by equality of text."""

from adrl_jax.types import Score


def score_exact(response: str, reference: str, *, ignore_case: bool = False, truncated: bool = False) -> Score:
    """1 where the response equals the reference up to white space at the ends and its amount between words, else 0.

    An empty or truncated response is `unparsed_response`, an empty reference `unparsed_reference`.
    """
    wanted, got = " ".join(str(reference).split()), " ".join(response.split())
    if not wanted:
        return Score(0.0, got or None, "unparsed_reference", detail="reference is empty")
    if not got or truncated:
        return Score(0.0, None, "unparsed_response")
    match = wanted.casefold() == got.casefold() if ignore_case else wanted == got
    return Score(float(match), got, "match" if match else "mismatch")
