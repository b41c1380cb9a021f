"""Training: fit, evaluate and predict, with metrics, callbacks and checkpoints."""

from .callback import Callback, Run
from .callbacks import Checkpoint, EarlyStopping, PlateauSchedule, Validation
from .evaluation import Evaluator, evaluate, predict
from .files import safetensors
from .files.checkpoint import Saved, load
from .files.models import load_model, save
from .files.pretrained import load_efficientnet_lite, load_gpt2
from .files.torch_files import read_torch_file
from .history import History
from .loop import fit
from .metrics import (
    F1,
    Accuracy,
    BinaryAccuracy,
    ConfusionMatrix,
    Metric,
    Precision,
    Recall,
    TopK,
    accuracy,
)
from .report import JsonLog, Progress, TensorBoard
