//! Extra keys: what besides its tokens makes a block's KV different.
//!
//! vLLM's order is fixed (adapter, multimodal, salt, embeddings) and each key is a tuple that begins with its
//! tag, so that no two kinds can be confused. Which keys a block carries follows from the prompt:
//! the adapter in every block, a multimodal item in each block it overlaps, the salt in the first block only, the
//! digest of the embeddings in the block they belong to.

/// One extra key of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraKey<'a> {
    /// A LoRA adapter: its name and where it was loaded from.
    Lora {
        /// Name of the adapter.
        name: &'a str,
        /// Path of the adapter.
        path: &'a str,
    },
    /// A multimodal item that overlaps the block.
    Multimodal {
        /// The item's content hash or chosen identifier.
        identifier: &'a str,
        /// Tokens from the block's start to the item's; negative when the item began in an earlier block.
        offset: i64,
    },
    /// Isolation salt of the request; first block only.
    CacheSalt(&'a str),
    /// SHA-256 over the block's prompt embeddings.
    PromptEmbeds(&'a [u8; 32]),
}

/// A multimodal item of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultimodalItem {
    /// The item's content hash or chosen identifier.
    pub identifier: String,
    /// First token of the prompt that it occupies.
    pub start_token: usize,
    /// Tokens that it occupies.
    pub tokens: usize,
}

/// Everything besides tokens that a prompt's hashes depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptExtras {
    /// Name and path of the LoRA adapter.
    pub lora: Option<(String, String)>,
    /// Multimodal items, in ascending order of their start.
    pub multimodal: Vec<MultimodalItem>,
    /// Isolation salt of the request.
    pub cache_salt: Option<String>,
    /// SHA-256 over each block's prompt embeddings, by block; empty for prompts of tokens.
    pub prompt_embeds: Vec<[u8; 32]>,
}

impl PromptExtras {
    /// Writes the keys of block number `block` into `keys`, replacing what is there, in vLLM's order.
    pub fn keys_of_block<'a>(&'a self, block: usize, tokens_per_block: usize, keys: &mut Vec<ExtraKey<'a>>) {
        keys.clear();
        if let Some((name, path)) = &self.lora {
            keys.push(ExtraKey::Lora { name, path });
        }
        let start = block * tokens_per_block;
        let end = start + tokens_per_block;
        let overlapping = self
            .multimodal
            .iter()
            .filter(|item| item.start_token < end && start < item.start_token + item.tokens);
        keys.extend(overlapping.map(|item| ExtraKey::Multimodal {
            identifier: &item.identifier,
            offset: item.start_token as i64 - start as i64,
        }));
        if let (0, Some(salt)) = (block, &self.cache_salt) {
            keys.push(ExtraKey::CacheSalt(salt));
        }
        if let Some(sha256) = self.prompt_embeds.get(block) {
            keys.push(ExtraKey::PromptEmbeds(sha256));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(extras: &PromptExtras, block: usize) -> Vec<ExtraKey<'_>> {
        let mut keys = Vec::new();
        extras.keys_of_block(block, 16, &mut keys);
        keys
    }

    #[test]
    fn an_item_is_in_each_block_it_overlaps_with_its_offset_from_the_block() {
        let item = MultimodalItem { identifier: "image".into(), start_token: 20, tokens: 28 };
        let extras = PromptExtras { multimodal: vec![item], ..PromptExtras::default() };
        let at = |offset| vec![ExtraKey::Multimodal { identifier: "image", offset }];
        assert_eq!(keys(&extras, 0), []);
        assert_eq!(keys(&extras, 1), at(4));
        assert_eq!(keys(&extras, 2), at(-12));
        assert_eq!(keys(&extras, 3), [], "the item's last token is 47");
    }

    #[test]
    fn keys_come_in_the_order_of_vllm() {
        let extras = PromptExtras {
            lora: Some(("ad".into(), "/p".into())),
            multimodal: vec![MultimodalItem { identifier: "i".into(), start_token: 0, tokens: 1 }],
            cache_salt: Some("s".into()),
            prompt_embeds: vec![[1; 32]],
        };
        let all = keys(&extras, 0);
        assert!(matches!(
            all.as_slice(),
            [
                ExtraKey::Lora { .. },
                ExtraKey::Multimodal { .. },
                ExtraKey::CacheSalt("s"),
                ExtraKey::PromptEmbeds(_)
            ]
        ));
        assert_eq!(keys(&extras, 1), [ExtraKey::Lora { name: "ad", path: "/p" }]);
    }
}
