_base_ = './inline-cswin-t_8xb128_in1k.py'
model = dict(model_name='inline_cswin_small', drop_path_rate=0.4)
