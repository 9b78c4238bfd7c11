torchrun --nproc_per_node=8 --nnodes=2 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=$HOST:29400 train.py
