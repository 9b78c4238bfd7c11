deepspeed --hostfile=myhostfile --include="worker-2:0,1" train.py --deepspeed --deepspeed_config first_steps.json
deepspeed --hostfile=myhostfile --num_nodes=2 train.py --deepspeed --deepspeed_config=first_steps.json
