"""`deepspeed.runtime.dataloader`: a loader that begins again. The rest is not here."""


class RepeatingLoader:
    """Batches of a loader without end: the loader begins again after its last one."""

    def __init__(self, loader):
        self.loader, self.data_iter = loader, iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
