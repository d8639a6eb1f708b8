"""The version of PyTorch at which its behaviour changes for us."""

import torch

# The tests ran with torch 2.6 and 2.13 and no version between, so what differs is taken to change at 2.13.
# torch.__version__ is a TorchVersion, which compares by number: "2.6" < "2.13", unlike plain strings.
TORCH_2_13 = torch.__version__ >= "2.13"
