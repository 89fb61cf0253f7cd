/// Where a visit of a [`Decoder`](crate::Decoder) stands: field names, and whether they are stacked
/// experts.
#[derive(Default)]
pub(crate) struct ModulePath {
    names: Vec<String>,
    inside_experts: usize,
}

impl ModulePath {
    pub fn enter(&mut self, name: &str, container: &str) {
        // Which kind of attention it is shows in the names of its parts.
        let name = if container == "Enum:Attention" {
            ""
        } else {
            name
        };
        self.names.push(name.into());
        self.inside_experts += usize::from(container.ends_with("GroupedExperts"));
    }

    pub fn exit(&mut self, container: &str) {
        self.names.pop();
        self.inside_experts -= usize::from(container.ends_with("GroupedExperts"));
    }

    /// Whether parameters here are stacked experts.
    pub fn inside_experts(&self) -> bool {
        self.inside_experts > 0
    }

    /// The parameter's name, such as `layers.1.attention.kv_down.weight`.
    pub fn name(&self) -> String {
        self.parts().join(".")
    }

    /// The name of one expert's part: `...experts.17.down`.
    pub fn expert_name(&self, expert: usize) -> String {
        let expert = expert.to_string();
        let mut names = self.parts();
        names.insert(names.len().saturating_sub(1), &expert);
        names.join(".")
    }

    /// The names on the way from the decoder to the parameter.
    pub fn parts(&self) -> Vec<&str> {
        let names = self.names.iter().map(String::as_str);
        names.filter(|name| !name.is_empty()).collect()
    }
}
