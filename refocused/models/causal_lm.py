"""A transformers network of any family, with a head that returns the loss."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from refocused.models.attention import document_blocks, document_mask
from refocused.models.head_loss import LogitTerms, LossHead, label_scores
from refocused.models.sequence_parallel import SequenceGroup

LARGEST_LOGIT_TERM = 1.0  # nats; beyond it the initialization is too wide to train from
DEFAULT_INITIALIZER_RANGE = 0.02  # of GPT-2 and GPT-NeoX in transformers
NETWORK_PREFIX = "network."  # of the parameters of `CausalLM`, before transformers' names


class CausalLM(nn.Module):
    """A causal language model: `loss` is what it is trained on, `logits` are its predictions.

    Attributes:
        network: The transformers model, with a `LossHead`. It has transformers' parameter names,
            so that `network.save_pretrained` writes an ordinary checkpoint.
        block_shape: `(B, T)` of the passes that mask documents by FlexAttention; other shapes use a
            dense mask. None: all do.
        sequence: The ranks that share the tokens of `loss`. None: each has sequences of its own.
    """

    block_shape: tuple[int, int] | None = None
    sequence: SequenceGroup | None = None

    def __init__(
        self,
        network: Any,
        *,
        chunk_tokens: int,
        document_id: int | None = None,
        z_loss: float = 0.0,
    ) -> None:
        """Replace the head of a transformers causal model by one that returns the loss.

        Args:
            network: The transformers model.
            chunk_tokens: Tokens whose logits exist at once in the loss.
            document_id: Id that begins each document, to attend only within documents; None:
                attend across them.
            z_loss: See `LogitTerms`.
        """
        super().__init__()
        self.document_id = document_id
        head = network.get_output_embeddings()
        self._terms = LogitTerms(softcap_of(network), z_loss)
        network.set_output_embeddings(
            LossHead(head.weight, chunk_tokens=chunk_tokens, terms=self._terms)
        )
        self.network = network

    def forward(self, *inputs: Tensor, compute: str = "loss", **options: Any) -> Any:
        """Return what a method of this class computes: `loss`, `logits` or `label_scores`.

        Under ZeRO-3 call these through here: by the hooks of this module DeepSpeed sees where a
        pass begins and ends. Otherwise it forgets the order in which it fetches parameters ahead.
        """
        return getattr(self, compute)(*inputs, **options)

    def loss(self, input_ids: Tensor, labels: Tensor, *, of_each: bool = False) -> Tensor:
        """Return the mean cross-entropy `[]` of tokens `[B, T]` and the next tokens `[B, T]`.

        Labels of -100 are not counted. If ranks share the sequences, all of them pass all tokens
        and labels, and call together; while gradients are recorded, the loss is this rank's part,
        and the mean of the parts is that of the sequences.

        With `of_each`, return the loss of each label instead, in nats without a gradient, `[B, T]`
        (of a rank that shares sequences, `[B, T / N]`: those of its slice); 0 for -100.
        """
        head, group = self.network.get_output_embeddings(), self.sequence
        hidden = self._hidden(input_ids, group)
        loss: Tensor = head(hidden, labels if group is None else group.own(labels), of_each=of_each)
        if group is None or of_each:
            return loss
        loss = loss * group.label_share(labels)
        return loss if torch.is_grad_enabled() else group.mean(loss)

    def logits(self, input_ids: Tensor, *, last: int | None = None) -> Tensor:
        """Return the logits `[B, T, V]` of the next tokens, or only those of the `last` ones."""
        hidden = self._hidden(input_ids)
        return self._capped_head(hidden if last is None else hidden[:, -last:])

    def _capped_head(self, hidden: Tensor) -> Tensor:
        return self._terms.cap(self.network.get_output_embeddings()(hidden))

    def label_scores(
        self, input_ids: Tensor, labels: Tensor, *, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """Score the labels of each sequence; see `head_loss.label_scores`.

        The head is called once, so that ranks may have different numbers of labels.
        """
        hidden = self._hidden(input_ids)
        return label_scores(self._capped_head, hidden, labels, vocabulary=vocabulary)

    def _hidden(self, input_ids: Tensor, group: SequenceGroup | None = None) -> Tensor:
        documents: dict[str, Any] = {}
        positions = None
        if self.document_id is not None:
            positions = document_positions(input_ids, document_id=self.document_id)
            documents = {"position_ids": positions}
            if input_ids.shape == self.block_shape:
                documents["document_blocks"] = document_blocks(positions)
            else:
                mask = document_mask(input_ids, document_id=self.document_id)
                documents["attention_mask"] = mask
        if group is not None:
            if positions is None:
                positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
            documents |= {"position_ids": group.own(positions), "sequence_group": group}
            input_ids = group.own(input_ids)
        states: Tensor = self.network.base_model(
            input_ids=input_ids, use_cache=False, **documents
        ).last_hidden_state
        return states

    @property
    def block_class(self) -> type[nn.Module]:
        """The class of the repeated block, the unit of gathering, recomputing and compiling."""
        body = self.network.base_model
        return type(body.h[0] if hasattr(body, "h") else body.layers[0])


def softcap_of(network: Any) -> float | None:
    """Return the bound of a transformers model's logits."""
    found: float | None = getattr(network.config, "final_logit_softcapping", None)
    return found


def document_positions(input_ids: Tensor, *, document_id: int) -> Tensor:
    """Return each token's position in its document, `[B, T]`.

    A document begins with `document_id`. The tokens before a sequence's first one count from 0.
    """
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    begins = torch.where(input_ids == document_id, places, 0).cummax(dim=1).values
    return places - begins


def untrained_loss(*, rows: int, width: int, initializer_range: float) -> float:
    """Return the expected loss of an initialized model on random tokens, in nats.

    The final norm gives D hidden states unit variance, and the head's weights are N(0, s^2), so
    logits are N(0, D s^2) and the loss is ln(V) + D s^2 / 2. At D 1536 and s 0.02 that is 0.31
    above ln(V). `rows` is V, the rows of the embedding, including padding.
    """
    return math.log(rows) + min(width * initializer_range**2 / 2, LARGEST_LOGIT_TERM)


def counted_parameters(model: nn.Module) -> int:
    """Count the parameters of a model, tied ones once; full sizes also under ZeRO-3."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in set(model.parameters()))
