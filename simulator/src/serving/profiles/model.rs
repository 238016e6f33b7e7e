//! A model: its weights, its attention and the layout of its KV cache, from a file with its source.

use reprise_policy::layout::Parts;
use reprise_policy::{Dtype, Layout, LayoutSpec};
use serde::Deserialize;
use toml::Spanned;

use super::{MODELS, Place, ProfileError};

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelFile {
    name: String,
    title: String,
    source: Spanned<String>,
    parameters_billion: Spanned<f64>,
    active_parameters_billion: Spanned<f64>,
    layers: u16,
    hidden: Spanned<u32>,
    query_heads: Spanned<u32>,
    query_dim: Spanned<u32>,
    value_dim: Spanned<u32>,
    context: Spanned<u32>,
    layout: Spanned<LayoutFile>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayoutFile {
    parts: Parts,
    kv_heads: u16,
    head_dim: u16,
    dtype: Dtype,
}

/// A model: its weights, its attention and the layout of its KV cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Name of the model.
    pub name: String,
    /// Name in texts for people.
    pub title: String,
    /// Number of all weights.
    pub parameters: f64,
    /// Number of weights that a token uses.
    pub active_parameters: f64,
    /// Number of attention layers.
    pub layers: u16,
    /// Dimensions of queries plus those of values, over all heads of a layer.
    pub attention_dims: u64,
    /// Longest context in tokens.
    pub context: u32,
    layout: LayoutFile,
}

impl Model {
    /// Names of all models.
    pub fn names() -> Vec<&'static str> {
        MODELS.iter().map(|file| file.0).collect()
    }

    /// Returns a built-in model.
    pub fn named(name: &str) -> Result<Model, ProfileError> {
        let file = MODELS.iter().find(|file| file.0 == name).ok_or_else(|| {
            ProfileError(format!(
                "unknown model '{name}': use one of {}, or the path of a file with its layout, as MODEL.toml",
                Model::names().join(", ")
            ))
        })?;
        Model::parse(file.1, file.2)
    }

    /// Parses and checks a model; errors name the file, the line and the remedy.
    pub fn parse(path: &str, text: &str) -> Result<Model, ProfileError> {
        let file: ModelFile = toml::from_str(text).map_err(|error| {
            ProfileError(format!(
                "{path}: model without a known layout: {}; take the field from the model's config.json",
                error.to_string().trim()
            ))
        })?;
        Model::of_file(Place { path, text }, file)
    }

    pub(super) fn of_file(place: Place<'_>, file: ModelFile) -> Result<Model, ProfileError> {
        let whole = |name, value: &Spanned<u32>, least, most| {
            (name, f64::from(*value.get_ref()), value.span().start, least, most)
        };
        let (all, active) = (&file.parameters_billion, &file.active_parameters_billion);
        let (parameters, active_parameters) = (*all.get_ref(), *active.get_ref());
        let checks = [
            ("parameters_billion", parameters, all.span().start, 0.001, 20_000.0),
            ("active_parameters_billion", active_parameters, active.span().start, 0.001, parameters),
            whole("hidden", &file.hidden, 1.0, 1e6),
            whole("query_heads", &file.query_heads, 1.0, 4096.0),
            whole("query_dim", &file.query_dim, 1.0, 8192.0),
            whole("value_dim", &file.value_dim, 1.0, 8192.0),
            whole("context", &file.context, 1.0, 1e9),
        ];
        // Written so that NaN is outside.
        let impossible =
            checks.into_iter().find(|(_, value, _, least, most)| !(*least..=*most).contains(value));
        if let Some((name, value, at, least, most)) = impossible {
            return Err(place.error(
                at,
                &format!(
                    "impossible {name} {value}: expected {least} to {most}, take it from the model's config.json"
                ),
            ));
        }
        if file.source.get_ref().trim().is_empty() {
            let at = file.source.span().start;
            return Err(place.error(at, "empty source: name the document that states the layout"));
        }
        let layout_at = file.layout.span().start;
        let model = Model {
            name: file.name,
            title: file.title,
            parameters: parameters * 1e9,
            active_parameters: active_parameters * 1e9,
            layers: file.layers,
            attention_dims: u64::from(*file.query_heads.get_ref())
                * u64::from(file.query_dim.get_ref() + file.value_dim.get_ref()),
            context: *file.context.get_ref(),
            layout: file.layout.into_inner(),
        };
        let invalid = |error| place.error(layout_at, &format!("{error}: correct [layout]"));
        model.layout(16).map_err(invalid)?;
        Ok(model)
    }

    /// Production layout of the KV cache on one rank that has all heads.
    pub fn layout(&self, tokens_per_block: u16) -> Result<Layout, ProfileError> {
        let LayoutFile { parts, kv_heads, head_dim, dtype } = self.layout;
        let layers = self.layers;
        let spec =
            LayoutSpec { layers, parts, kv_heads, head_dim, dtype, tokens_per_block, tp_rank: 0, tp_size: 1 };
        spec.validate().map_err(|error| ProfileError(error.to_string()))
    }

    /// Bytes of KV cache of one token, over all ranks.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let LayoutFile { parts, kv_heads, head_dim, dtype } = self.layout;
        u64::from(self.layers) * parts as u64 * u64::from(kv_heads) * u64::from(head_dim) * dtype.bytes()
    }

    /// Operations of attention between a token and one token before it.
    pub fn flops_per_pair(&self) -> f64 {
        2.0 * f64::from(self.layers) * self.attention_dims as f64
    }

    /// Bytes of the weights, in 16 bits.
    pub fn weight_bytes(&self) -> u64 {
        (self.parameters * 2.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_without_a_layout_is_refused_with_the_remedy() {
        let (_, path, text) = MODELS[0];
        let cut = &text[..text.find("[layout]").expect("has a layout")];
        let error = Model::parse(path, cut).expect_err("refused").to_string();
        assert!(
            ["llama-3-8b.toml", "layout", "config.json"].iter().all(|part| error.contains(part)),
            "{error}"
        );
        let error = Model::parse(path, &text.replace("kv_heads = 8", "kv_heads = 0"))
            .expect_err("refused")
            .to_string();
        assert!(
            ["llama-3-8b.toml", "kv_heads", "at least 1"].iter().all(|part| error.contains(part)),
            "{error}"
        );
        let error = Model::named("gpt-9").expect_err("refused").to_string();
        assert!(error.contains("'gpt-9'") && error.contains("qwen3-32b"), "{error}");
    }
}
