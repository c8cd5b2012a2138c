_base_ = './inline-swin-t_8xb128_in1k.py'
model = dict(model_name='inline_swin_base', drop_path_rate=0.5)
