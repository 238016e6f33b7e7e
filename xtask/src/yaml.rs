//! YAML as the generator of the definitions writes it: block mappings and lists, and scalars of one line.

/// A key with its scalar and the keys below it. The keys of all items of a list are below the list.
#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) scalar: String,
    pub(crate) children: Vec<Node>,
}

impl Node {
    /// Parses a document.
    ///
    /// # Errors
    /// The first line that is not understood.
    pub(crate) fn parse(text: &str) -> Result<Node, String> {
        let mut entries = Vec::new();
        for line in text.lines() {
            let content = line.trim_start();
            let mut indent = line.len() - content.len();
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let mut content = content;
            let mut is_item = false;
            while let Some(rest) = content.strip_prefix("- ") {
                (content, indent, is_item) = (rest, indent + 2, true);
            }
            match split(content) {
                Some((_, value)) if value.starts_with(['|', '>']) => {
                    return Err(format!("block scalars are not supported: {line}"));
                }
                Some((name, value)) => entries.push((indent, name, value)),
                None if is_item => {}
                None => return Err(format!("expected a key: {line}")),
            }
        }
        let mut root = Node::default();
        root.add(&mut entries.into_iter().peekable(), 0);
        Ok(root)
    }

    fn add<'t>(
        &mut self,
        entries: &mut std::iter::Peekable<impl Iterator<Item = (usize, &'t str, &'t str)>>,
        least: usize,
    ) {
        while let Some((indent, name, scalar)) = entries.next_if(|(indent, ..)| *indent >= least) {
            let mut child = Node { name: name.to_owned(), scalar: scalar.to_owned(), children: Vec::new() };
            child.add(entries, indent + 1);
            self.children.push(child);
        }
    }

    /// Returns the node at a path of names.
    pub(crate) fn at(&self, path: &[&str]) -> Option<&Node> {
        match path.split_first() {
            None => Some(self),
            Some((name, rest)) => self.children.iter().find(|child| child.name == *name)?.at(rest),
        }
    }
}

fn split(content: &str) -> Option<(&str, &str)> {
    // A scalar that contains a colon is quoted, or an item of a list.
    let (name, value) = match content.strip_suffix(':') {
        Some(name) if !name.contains(": ") => (name, ""),
        _ => content.split_once(": ")?,
    };
    let is_name = !name.is_empty() && !name.contains([' ', '{', '[', '\'', '"']);
    is_name.then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_mappings_and_lists() {
        let text =
            "# Generated.\nkind: A\nspec:\n  names:\n  - one\n  - two: 2\n    three: 'it: is'\n  last: 4\n";
        let root = Node::parse(text).expect("it parses");
        assert_eq!(root.at(&["kind"]).map(|node| node.scalar.as_str()), Some("A"));
        let names: Vec<&str> = root
            .at(&["spec", "names"])
            .expect("it exists")
            .children
            .iter()
            .map(|node| node.name.as_str())
            .collect();
        assert_eq!(names, ["two", "three"]);
        assert_eq!(root.at(&["spec", "last"]).map(|node| node.scalar.as_str()), Some("4"));
        assert!(root.at(&["spec", "names", "last"]).is_none());
        assert!(Node::parse("a: |\n  b\n").is_err());
    }
}
