//! Extra keys: properties of a prompt, other than its tokens, that change a block's KV.
//!
//! vLLM's order is fixed (adapter, multimodal, salt, embeddings), and each key is a tuple that begins with
//! its tag, so that kinds cannot be confused. The keys of a block follow from the prompt: the adapter in
//! every block, a multimodal item in each block that it overlaps, the salt in the first block only, and the
//! digest of the embeddings in their block.

/// Extra key of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraKey<'a> {
    /// LoRA adapter with its name and path.
    Lora {
        /// Name of the adapter.
        name: &'a str,
        /// Path from which the adapter was loaded.
        path: &'a str,
    },
    /// Multimodal item that overlaps the block.
    Multimodal {
        /// Content hash or chosen identifier of the item.
        identifier: &'a str,
        /// Offset of the item from the block's start in tokens; negative if the item begins in an earlier
        /// block.
        offset: i64,
    },
    /// Isolation salt of the request, in the first block only.
    CacheSalt(&'a str),
    /// SHA-256 of the block's prompt embeddings.
    PromptEmbeds(&'a [u8; 32]),
}

/// Multimodal item of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultimodalItem {
    /// Content hash or chosen identifier of the item.
    pub identifier: String,
    /// First token of the prompt that the item occupies.
    pub start_token: usize,
    /// Number of tokens that the item occupies.
    pub tokens: usize,
}

/// Properties of a prompt, other than its tokens, that its hashes depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptExtras {
    /// Name and path of the LoRA adapter.
    pub lora: Option<(String, String)>,
    /// Multimodal items in ascending order of their start.
    pub multimodal: Vec<MultimodalItem>,
    /// Isolation salt of the request.
    pub cache_salt: Option<String>,
    /// SHA-256 of each block's prompt embeddings, by block; empty for prompts of tokens.
    pub prompt_embeds: Vec<[u8; 32]>,
}

impl PromptExtras {
    /// Writes the keys of block number `block` into `keys` in vLLM's order, replacing its contents.
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
    fn item_is_in_each_block_that_it_overlaps_with_its_offset() {
        let item = MultimodalItem { identifier: "image".into(), start_token: 20, tokens: 28 };
        let extras = PromptExtras { multimodal: vec![item], ..PromptExtras::default() };
        let at = |offset| vec![ExtraKey::Multimodal { identifier: "image", offset }];
        assert_eq!(keys(&extras, 0), []);
        assert_eq!(keys(&extras, 1), at(4));
        assert_eq!(keys(&extras, 2), at(-12));
        assert_eq!(keys(&extras, 3), [], "the item's last token is 47");
    }

    #[test]
    fn keys_have_the_order_of_vllm() {
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
