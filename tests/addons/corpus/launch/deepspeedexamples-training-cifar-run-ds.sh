deepspeed --bind_cores_to_rank --bind_core_list 0-9,12-21,24-33 cifar10_deepspeed.py --log-interval 250 --deepspeed --deepspeed_config ds_config.json $@
