"""Figures of scores are those of scikit-learn and SciPy, and do not depend on the order of the documents."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import pearsonr
from sklearn.calibration import calibration_curve
from sklearn.metrics import f1_score, r2_score, roc_auc_score

from raytune_fsdp.run.evaluation.score_figures import area_under_curve, of_classes, of_numbers, of_pairs


def _draw(classes: int, documents: int = 400) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(classes)
    own = draw.integers(classes, size=documents)
    scores = draw.normal(size=(documents, classes))
    scores[np.arange(documents), own] += 0.7
    return scores, own.astype(np.float64)


@pytest.mark.parametrize("classes", [2, 5])
def test_classes_as_in_scikit_learn(classes: int) -> None:
    scores, own = _draw(classes)
    found = of_classes(scores, own)
    odds = np.exp(scores)
    probabilities = odds / odds.sum(1, keepdims=True)
    likely = scores.argmax(1)
    assert found["accuracy"] == (likely == own).mean()
    assert found["f1"] == pytest.approx(f1_score(own, likely, average="macro"), abs=1e-12)
    asked = {"y_score": probabilities[:, 1]} if classes == 2 else {"y_score": probabilities, "multi_class": "ovr"}
    assert found["auc"] == pytest.approx(roc_auc_score(own, **asked), abs=1e-12)
    right, confident = calibration_curve(likely == own, probabilities.max(1), n_bins=10)
    points = [(found[name], found[name.replace("confidence", "right")]) for name in found if "/confidence" in name]
    assert points == [pytest.approx(each) for each in zip(confident, right, strict=True)]


def test_classes_that_no_document_has_are_left_out() -> None:
    scores, own = _draw(5)
    some = own < 2
    found = of_classes(scores[some], own[some])
    assert 0.5 < found["auc"] < 1 and found["f1"] < 1
    alone = of_classes(scores[own == 1], own[own == 1])
    assert "auc" not in alone and alone["accuracy"] > 0


def test_numbers_as_in_scikit_learn_and_scipy() -> None:
    draw = np.random.default_rng(0)
    wanted = draw.normal(3, 2, size=200)
    scores = wanted + draw.normal(size=200)
    found = of_numbers(scores, wanted)
    assert found["mae"] == np.abs(scores - wanted).mean()
    assert found["r2"] == pytest.approx(r2_score(wanted, scores))
    assert found["pearson"] == pytest.approx(pearsonr(wanted, scores)[0])
    assert list(of_numbers(scores, np.ones(200))) == ["mae"] and "pearson" not in of_numbers(np.ones(200), wanted)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_right_for_nothing(odd: float) -> None:
    """And end no run: in 16 bits a document may overflow that is only measured."""
    scores, own = _draw(3)
    scores[7, 1] = odd
    found, rest = of_classes(scores, own), of_classes(np.delete(scores, 7, 0), np.delete(own, 7))
    assert found["accuracy"] == pytest.approx(rest["accuracy"] * 399 / 400)
    assert [name for name, value in found.items() if np.isnan(value)] == ["auc", "calibration_error"]
    assert np.isnan(of_pairs(np.array([0.5, np.nan]))["calibration_error"])
    assert np.isfinite(of_pairs(np.array([0.5, np.inf]))["calibration_error"])


def test_pairs_that_are_as_sure_as_they_are_right_are_calibrated() -> None:
    draw = np.random.default_rng(0)
    margins = draw.normal(size=100_000)
    right = draw.random(100_000) < 1 / (1 + np.exp(-np.abs(margins)))
    found = of_pairs(np.where(right, np.abs(margins), -np.abs(margins)))
    assert found["calibration_error"] < 0.01
    assert of_pairs(np.full(100, 9.0) * np.where(np.arange(100) % 2, 1, -1))["calibration_error"] > 0.49


def test_nothing_depends_on_the_order_of_documents_and_extremes_are_told_apart() -> None:
    scores, own = _draw(3)
    turned = np.random.default_rng(1).permutation(len(own))
    one, other = of_classes(scores, own), of_classes(scores[turned], own[turned])
    assert one == {name: pytest.approx(value, abs=1e-12) for name, value in other.items()}
    assert of_classes(np.array([[0.0, 800.0], [0.0, 900.0]]), np.array([0.0, 1.0]))["auc"] == 1.0
    assert area_under_curve(np.zeros(4), np.array([True, False, False, True])) == 0.5
