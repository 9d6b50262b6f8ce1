"""The record sent on: MLflow, Weights & Biases, TensorBoard.

following.py      a tracker that follows the record in a thread, where loggers are silent; the id by which a receiver
                  knows a run
mlflow.py         the run in MLflow
mlflow_run.py     the run as the MLflow server has it
mlflow_extras.py  what MLflow gets besides metrics: attempts, tables, the report
mlflow_model.py   the export in MLflow's registry
tensorboard.py    the run in TensorBoard; wandb.py: in Weights & Biases
"""
