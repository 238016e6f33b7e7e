//! Profile of a node in one file: its accelerator, the parts that were measured, and the model.
//!
//! `reprise profile --vllm` writes such a file. Parts that it lacks are the usual ones of the accelerator.
//!
//! ```toml
//! [accelerator]
//! name = "measured"
//! title = "vLLM on 2 cores"
//! parts = ["local", "ddr5", "gen4", "tcp", "object"]
//! [accelerator.figures.memory_gb]
//! value = 24
//! source = "MemTotal"
//! [link]          # also memory, device, network, cold
//! [model]         # as in simulator/profiles/models/
//! ```

use serde::Deserialize;

use super::{Hardware, KINDS, Model, ModelFile, Part, ProfileError, check, find, list, parse};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeFile {
    accelerator: Part,
    link: Option<Part>,
    memory: Option<Part>,
    device: Option<Part>,
    network: Option<Part>,
    cold: Option<Part>,
    model: ModelFile,
}

/// Hardware of a node and the model that it serves.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeProfile {
    /// Hardware of the node.
    pub hardware: Hardware,
    /// Model of its engine.
    pub model: Model,
}

impl NodeProfile {
    /// Parses and checks a file; errors name the file and the field.
    pub fn parse(path: &str, text: &str) -> Result<NodeProfile, ProfileError> {
        let file: NodeFile = toml::from_str(text).map_err(|error| {
            ProfileError(format!("{path}: invalid profile of a node: {}", error.to_string().trim()))
        })?;
        let NodeFile { accelerator, link, memory, device, network, cold, model } = file;
        check(0, path, &accelerator)?;
        let usual = accelerator.parts.clone();
        let name = accelerator.name.clone();
        let mut parts = vec![accelerator];
        for (kind, measured) in (1..KINDS.len()).zip([link, memory, device, network, cold]) {
            let part = match (measured, usual.get(kind - 1)) {
                (Some(part), _) => {
                    check(kind, path, &part)?;
                    part
                }
                (None, Some(name)) => built_in(kind, path, name)?,
                (None, None) => continue,
            };
            parts.push(part);
        }
        let hardware = Hardware::of_kinds(&name, path, parts)?;
        Ok(NodeProfile { hardware, model: Model::of_file(path, model)? })
    }
}

fn built_in(kind: usize, path: &str, name: &str) -> Result<Part, ProfileError> {
    let file = find(kind, name).ok_or_else(|| {
        ProfileError(format!("{path}: unknown {} '{name}' in parts: use {}", KINDS[kind].0, list(kind)))
    })?;
    parse(kind, file.1, file.2)
}

#[cfg(test)]
mod tests {
    use super::super::{ACCELERATORS, LINKS, MODELS};
    use super::*;

    /// A part or model as a table of a node's file.
    fn table(name: &str, text: &str) -> String {
        let nested = text.replace("[figures.", &format!("[{name}.figures."));
        format!("[{name}]\n{}\n", nested.replace("[layout]", &format!("[{name}.layout]")))
    }

    fn node() -> String {
        let link = LINKS[2].2.replacen("value = ", "value = 1", 1);
        [table("accelerator", ACCELERATORS[3].2), table("link", &link), table("model", MODELS[0].2)].concat()
    }

    #[test]
    fn measured_parts_replace_the_usual_ones_of_the_accelerator() {
        let node = NodeProfile::parse("n.toml", &node()).expect("valid");
        let usual = Hardware::named("cpu").expect("valid");
        assert_eq!(node.model, Model::named("llama-3-8b").expect("valid"));
        assert_eq!((&node.hardware.nvme_read, &node.hardware.hbm), (&usual.nvme_read, &usual.hbm));
        assert_eq!(
            [usual.link, node.hardware.link].map(|link| link.bytes_per_second / 1_000_000_000),
            [17, 117]
        );
    }

    #[test]
    fn impossible_figures_and_missing_models_name_the_file() {
        let impossible = node().replacen("memory_gb_per_s]\nvalue = 20", "memory_gb_per_s]\nvalue = 0.2", 1);
        let error = NodeProfile::parse("n.toml", &impossible).expect_err("refused").to_string();
        assert!(error.contains("n.toml: impossible memory_gb_per_s 0.2"), "{error}");
        let cut = &node()[..node().find("[model]").expect("a model")];
        let error = NodeProfile::parse("n.toml", cut).expect_err("refused").to_string();
        assert!(error.contains("n.toml") && error.contains("model"), "{error}");
    }
}
