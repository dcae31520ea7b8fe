"""Measure whether an audit's intervals hold on unseen pictures: `pictures.py [--draws N --each N]`.

The two small networks of `tests/precision/test_grouped.py`, with depthwise and with grouped convolutions, are trained,
audited and calibrated on 128 pictures, and new assignments of several kinds predicted and measured over 128 others;
repeated for several draws of pictures. Prints the same as `heldout.py`, and how many predictions have a calibrated
interval.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from heldout import HEAD, Pairs, reported

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from assay.precision.auditing import Audit, audit
from tests.precision.recurrent_models import trained
from tests.precision.test_grouped import FORMATS, MODELS, loss, pictures


def assignments(result: Audit, draw: random.Random, each: int) -> dict[str, list[dict[str, str]]]:
    """Return assignments by kind: random, coarser half of the menus, coarsest, uniform, and single sites."""
    sites = [site for site in result.sites if not site.tied]
    coarser = {}
    for site in sites:
        menu = sorted(result.menu(site), key=lambda scheme, site=site: result.contribution(site, scheme))
        coarser[str(site)] = menu[len(menu) // 2 :]
    schemes = sorted({scheme for site in sites for scheme in result.menu(site)})
    return {
        "random, all sites": [result.random_assignment(draw) for _ in range(each)],
        "random, 30 % of sites": [result.random_assignment(draw, 0.3) for _ in range(each)],
        "random, 10 % of sites": [result.random_assignment(draw, 0.1) for _ in range(each)],
        "of the coarser half": [{site: draw.choice(menu) for site, menu in coarser.items()} for _ in range(each)],
        "the coarsest": [{site: menu[-1] for site, menu in coarser.items()}],
        "one scheme everywhere": [
            {str(site): scheme for site in sites if scheme in result.menu(site)} for scheme in schemes
        ],
        "static scales at one site": [
            {str(site): scheme} for site in sites for scheme in result.menu(site) if scheme.endswith("-static")
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3, help="of pictures, for each network")
    parser.add_argument("--each", type=int, default=60, help="random assignments of a kind and draw")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, (build, _) in MODELS.items():
        model = trained(build, [pictures(seed) for seed in range(4)], loss)
        pairs: Pairs = {}
        for number in range(given.draws):
            choice, check = ([pictures(5 + 4 * number + part) for part in parts] for parts in ((0, 1), (2, 3)))
            result = audit(model, choice, "kl", FORMATS, check=check, seed=number)
            result.calibrate(24)
            for kind, some in assignments(result, random.Random(number), given.each).items():
                measured = result.measure_together(some)
                pairs.setdefault(kind, []).extend(
                    (result.predict(one), float(error)) for one, error in zip(some, measured, strict=True)
                )
        print(f"\n{name}: {given.draws} draws, 24 assignments calibrated in each")
        print(HEAD)
        for kind, some in pairs.items():
            reported(kind, some)
        every = [pair for some in pairs.values() for pair in some if pair[0].error > 0 and pair[1] > 0]
        promised = [prediction.low <= error <= prediction.high for prediction, error in every if prediction.level]
        guesses = [prediction.low <= error <= prediction.high for prediction, error in every if not prediction.level]
        print(
            f"promised: {sum(promised)} of {len(promised)} inside; guesses: {sum(guesses)} of {len(guesses)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
