_base_ = './inline-pvt-t_8xb128_in1k.py'
model = dict(model_name='inline_pvt_large', drop_path_rate=0.3)
