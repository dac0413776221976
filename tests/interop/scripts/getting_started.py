"""In the style of DeepSpeed's first tutorial: arguments, a data set, four results of initialize."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=2)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
points = torch.randn(256, 2)
data = torch.utils.data.TensorDataset(points, (points.prod(dim=1) > 0).long())
net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
parameters = filter(lambda p: p.requires_grad, net.parameters())

model_engine, optimizer, trainloader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=data
)
criterion = nn.CrossEntropyLoss()
for epoch in range(args.epochs):
    trainloader.sampler.set_epoch(epoch)
    for data in trainloader:
        inputs, labels = data[0].to(model_engine.device), data[1].to(model_engine.device)
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
    if torch.distributed.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.6f} updates {model_engine.global_steps}")
