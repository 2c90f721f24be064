"""Label flip: hostile peers train as honest ones do, and take every label for its opposite.

y = num_labels - 1 - y ;  digits: 9 - y, bytes of text: 255 - y

What they send is arithmetic without fault, as long as an honest change, and fits the data of nobody.

Source: Tolpegin et al., "Data Poisoning Attacks Against Federated Learning Systems", 2020, arXiv:2007.08432; all labels
at once as in ByzFL (González et al., 2025, arXiv:2505.24802).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.lab.attacks.attack import Attack

__all__ = ["LabelFlip"]


@dataclass(frozen=True, slots=True)
class LabelFlip(Attack):
    """Honest work on wrong labels."""

    name: ClassVar[str] = "label_flip"
    equation: ClassVar[str] = "y = num_labels - 1 - y"
    source: ClassVar[str] = 'Tolpegin et al., "Data Poisoning Attacks", 2020, arXiv:2007.08432'
    poisons_data: ClassVar[bool] = True

    def labels(self, label_B: Tensor, num_labels: int) -> Tensor:
        """The opposite ones."""
        return num_labels - 1 - label_B
