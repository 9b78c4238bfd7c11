# Node 0; the other has --node_rank=1.
torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 train.py
