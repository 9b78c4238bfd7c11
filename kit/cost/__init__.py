"""Pure functions from model, cluster, job and layout to memory, time and money."""

from kit.cost.estimate import predict
from kit.cost.prediction import Prediction, StageMemory

__all__ = ["Prediction", "StageMemory", "predict"]
