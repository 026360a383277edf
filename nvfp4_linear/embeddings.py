"""Sentences of eight topics, and how near to each other their embeddings stay in 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .console import table

TOPIC_SIZE = 4  # sentences of each topic below

SENTENCES = {
    "cooking": (
        "Simmer the onions slowly in butter until they turn golden and sweet.",
        "She fried the garlic in olive oil before adding the chopped tomatoes.",
        "Season the soup with salt and pepper and let it cook for an hour.",
        "Roast the vegetables with olive oil until they are brown at the edges.",
    ),
    "weather": (
        "Heavy rain and strong winds are expected along the coast tomorrow.",
        "The storm brought hail and more rain than the whole of last month.",
        "The morning fog will lift by noon and the afternoon will be sunny.",
        "After a dry and hot summer, the forecast finally promises showers.",
    ),
    "software": (
        "The program crashed because it read past the end of an array.",
        "We fixed the bug in the parser, and every unit test passes now.",
        "A race condition between two threads corrupted the program's memory.",
        "The compiler warns about an unused variable in this function.",
    ),
    "music": (
        "The violinist played the slow movement of the concerto tenderly.",
        "The orchestra opened the concert with a symphony by Mozart.",
        "Their new album mixes jazz piano with electronic drums.",
        "He tuned his guitar and began to sing a quiet ballad.",
    ),
    "medicine": (
        "The doctor prescribed antibiotics for the patient's infection.",
        "The nurse measured the patient's blood pressure twice.",
        "The surgeon operated on the torn ligament in her knee.",
        "A mild fever often follows a vaccination and soon passes.",
    ),
    "football": (
        "The goalkeeper saved a penalty in the last minute of the match.",
        "Their striker scored two goals before half-time.",
        "The referee showed the defender a red card after a reckless tackle.",
        "The fans celebrated as the team won the cup final.",
    ),
    "space": (
        "The probe sent back the first close pictures of Jupiter's icy moon.",
        "Astronomers found a planet by the dimming of its star's light.",
        "The rocket carried the satellite into orbit around the Earth.",
        "Two galaxies will collide and merge in a few billion years.",
    ),
    "money": (
        "The central bank raised interest rates to slow inflation.",
        "Rising interest rates have made every new mortgage more expensive.",
        "She pays a part of her salary into a pension fund every month.",
        "Shares of the company fell after it reported a loss.",
    ),
}


def compare_embeddings(dense: Tensor, quantized: Tensor) -> dict[str, Any]:
    """How two embeddings of the same sentences agree; rows of length 1, (N, D).

    cosine: of each sentence with itself. first_neighbour_kept: sentences whose nearest other
    sentence is the same. rank_correlation: Spearman's, of the order of all others, a sentence.
    same_topic: sentences whose nearest other is of their own topic.
    """
    cosine = (dense * quantized).sum(dim=1)
    before, after = _similarities(dense), _similarities(quantized)
    correlation = spearman(before, after)
    topics = torch.arange(len(dense)) // TOPIC_SIZE
    first, second = before.argmax(dim=1), after.argmax(dim=1)
    return {
        "cosine_min": cosine.min().item(),
        "cosine_mean": cosine.mean().item(),
        "first_neighbour_kept": int((first == second).sum()),
        "rank_correlation_min": correlation.min().item(),
        "rank_correlation_mean": correlation.mean().item(),
        "same_topic_fp32": int((topics[first] == topics).sum()),
        "same_topic_nvfp4": int((topics[second] == topics).sum()),
    }


def _similarities(embeddings: Tensor) -> Tensor:
    """Cosines of every pair; a sentence with itself −inf, so that it comes last in every order."""
    return (embeddings @ embeddings.T).fill_diagonal_(-torch.inf)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation of each row's entries, the last-ranked (the row itself) left out."""
    n = a.shape[1] - 1
    ranks = [(-x).argsort(dim=1).argsort(dim=1).double() for x in (a, b)]
    squares = (ranks[0] - ranks[1]).square().sum(dim=1)
    return 1 - 6 * squares / (n * (n * n - 1))


def comparison_lines(comparisons: dict[str, dict[str, Any]], n: int) -> list[str]:
    columns = comparisons.values()
    topic = next(iter(columns))["same_topic_fp32"]
    return table(
        [
            ("what is in 4 bits", *comparisons),
            (
                "cosine with its FP32 self: min, mean",
                *(f"{c['cosine_min']:.4f}, {c['cosine_mean']:.4f}" for c in columns),
            ),
            ("nearest neighbour kept", *(f"{c['first_neighbour_kept']} of {n}" for c in columns)),
            (
                "order of all neighbours, rank correlation: min, mean",
                *(
                    f"{c['rank_correlation_min']:.3f}, {c['rank_correlation_mean']:.3f}"
                    for c in columns
                ),
            ),
            (
                f"nearest neighbour of the same topic (FP32: {topic} of {n})",
                *(f"{c['same_topic_nvfp4']} of {n}" for c in columns),
            ),
        ]
    )


def neighbour_lines(sentences: list[str], dense: Tensor, quantized: Tensor) -> list[str]:
    """A few sentences, one each of some topics, with their nearest neighbour before and after."""
    before, after = _similarities(dense), _similarities(quantized)
    lines = []
    for i in range(0, len(sentences), 2 * TOPIC_SIZE):
        lines.append(f"  {sentences[i]}")
        for what, similarities in (("FP32 ", before), ("NVFP4", after)):
            value, index = similarities[i].max(dim=0)
            lines.append(f"    {what}  {value:.3f}  {sentences[index]}")
    return lines
