deepspeed --num_nodes=${NUM_NODES} --num_gpus=${NUM_GPUS} --bind_cores_to_rank cifar10_deepspeed.py --log-interval 100 --deepspeed --moe --ep-world-size ${EP_SIZE} --num-experts ${EXPERTS}
