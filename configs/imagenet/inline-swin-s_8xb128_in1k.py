_base_ = './inline-swin-t_8xb128_in1k.py'
model = dict(model_name='inline_swin_small', drop_path_rate=0.3)
